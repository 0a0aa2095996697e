//! How often the log is told what goes wrong again and again.

use std::time::Duration;

use tokio::time::Instant;

const SPAN: Duration = Duration::from_secs(60);

/// Errors that differ in their numbers alone are of one kind, and each kind is told once a minute.
#[derive(Debug, Default)]
pub(crate) struct OnceAMinute {
    since: Option<Instant>,
    /// Since then.
    told: Vec<String>,
}

impl OnceAMinute {
    /// Whether this is to be told now.
    pub(crate) fn is_news(&mut self, error: &str) -> bool {
        if self.since.is_none_or(|since| since.elapsed() >= SPAN) {
            self.since = Some(Instant::now());
            self.told.clear();
        }
        let kind: String = error.chars().filter(|it| !it.is_ascii_digit()).collect();
        let is_news = !self.told.contains(&kind);
        if is_news {
            self.told.push(kind);
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_kind_of_error_is_told_once_a_minute() {
        let mut told = OnceAMinute::default();
        assert!(told.is_news("closed after 3s") && !told.is_news("closed after 12s"));
        assert!(told.is_news("WRONGPASS") && !told.is_news("WRONGPASS"));
        advance(Duration::from_secs(59)).await;
        assert!(!told.is_news("closed after 3s"));
        advance(Duration::from_secs(1)).await;
        assert!(told.is_news("WRONGPASS") && !told.is_news("WRONGPASS"));
        assert!(told.is_news("closed after 3s"));
    }
}
