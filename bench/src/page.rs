//! Pages of the repository, of which a marked part is made of a run.

use std::fs;
use std::path::{Path, PathBuf};

use crate::libs::Outcome;

pub(crate) struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    /// By its path from the root of the repository.
    pub(crate) fn of(path: &str) -> Outcome<Self> {
        let path = root().join(path);
        let text = read(&path)?;
        Ok(Self { path, text })
    }

    /// Replaces what is between `<!-- mark -->` and `<!-- /mark -->`.
    pub(crate) fn write(&self, mark: &str, part: &str) -> Outcome<()> {
        write(&self.path, &self.with(mark, part)?)
    }

    fn with(&self, mark: &str, part: &str) -> Outcome<String> {
        let (begin, end) = (format!("<!-- {mark} -->\n"), format!("<!-- /{mark} -->\n"));
        let split = self.text.split_once(&begin);
        let split = split.and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
        let missing = || format!("{} has no {begin} and {end}", self.path.display());
        let (before, after) = split.ok_or_else(missing)?;
        Ok(format!("{before}{begin}{part}{end}{after}"))
    }

    #[cfg(test)]
    pub(crate) fn has(&self, mark: &str, part: &str) -> bool {
        self.with(mark, part).unwrap() == self.text
    }
}

pub(crate) fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("the bench is in the workspace")
}

pub(crate) fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

pub(crate) fn write(path: &Path, text: &str) -> Outcome<()> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let page = |text: &str| Page {
            path: PathBuf::new(),
            text: text.to_owned(),
        };
        let old = page("a\n<!-- m -->\nold\n<!-- /m -->\nb\n");
        let new = "a\n<!-- m -->\nnew\n<!-- /m -->\nb\n";
        assert_eq!(old.with("m", "new\n").unwrap(), new);
        assert!(page("a\n").with("m", "new\n").is_err());
        assert!(
            page("<!-- /m -->\n<!-- m -->\n")
                .with("m", "new\n")
                .is_err()
        );
    }
}
