//! How a story is drawn: SVG, written by hand.

use std::fmt::Write;

use crate::part::{ALL, TTL};
use crate::story::{End, Hold, Story};
use crate::{PARTS, VICTIM};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 200.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 84.0;
const LANE: f64 = 78.0;
/// Of a lease, from the top of its lane.
const BAR: (f64, f64) = (12.0, 30.0);
/// Of the first wait, and how far the next is below it.
const WAIT: (f64, f64, f64) = (50.0, 6.0, 10.0);

/// Drawn on a card of its own, so that it can be read on whatever page; dark where the reader's is.
const STYLE: &str = "
  text { font-family: sans-serif; font-size: 13px; fill: #1f2933 }
  .title { font-size: 19px; font-weight: bold }
  .small { font-size: 12px; fill: #52606d }
  .name { font-size: 15px; font-weight: bold }
  .token { fill: #ffffff; font-weight: bold; text-anchor: middle }
  .alarm { fill: #b42318; font-weight: bold }
  .middle { text-anchor: middle }
  .card { fill: #ffffff; stroke: #cbd2d9 }
  .lane { fill: #f3f5f8 }
  .grid { stroke: #d9dee5 }
  .wait { fill: #9fb8d8 }
  .hold { fill: #2f6fbf }
  .passed { fill: #1f8a63 }
  .lost { fill: #c8372d }
  .pass, .renewed { fill: #ffffff }
  .dead { fill: url(#hatch); stroke: #c8372d; stroke-dasharray: 4 3 }
  .hatch { stroke: #c8372d; stroke-width: 2 }
  .kill { stroke: #c8372d; stroke-width: 2.5 }
  .cross { stroke: #ffffff; stroke-width: 2; fill: none }
  .gone { fill: #e3e7ec }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9aa7b4 }
    .alarm { fill: #ff8a80 }
    .card { fill: #12181f; stroke: #303a46 }
    .lane { fill: #1b232d }
    .grid { stroke: #2e3945 }
    .wait { fill: #47617f }
    .gone { fill: #161c24 }
  }
";

pub(crate) fn draw(story: &Story, place: &str) -> String {
    let mut picture = Picture {
        svg: String::new(),
        scale: (WIDTH - LEFT - RIGHT) / story.lasts.max(1.0),
    };
    picture
        .all(story, place)
        .expect("a String takes whatever is written");
    picture.svg
}

struct Picture {
    svg: String,
    /// Pixels a millisecond.
    scale: f64,
}

impl Picture {
    fn x(&self, millis: f64) -> f64 {
        LEFT + millis * self.scale
    }

    fn all(&mut self, story: &Story, place: &str) -> std::fmt::Result {
        #[allow(clippy::cast_precision_loss, reason = "a handful")]
        let floor = TOP + LANE * PARTS as f64;
        let height = floor + 92.0;
        let tokens = match &story.holds[..] {
            [first, .., last] => format!(
                "leases in the order of their fencing tokens, from {} (1) to {} ({}); ",
                first.token,
                last.token,
                story.holds.len()
            ),
            _ => String::new(),
        };
        writeln!(
            self.svg,
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">
<title>One lock, {PARTS} {place}</title>
<style>{STYLE}</style>
<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="8"/></pattern></defs>
<rect class="card" x="0.5" y="0.5" width="{}" height="{}" rx="10"/>
<text class="title" x="24" y="36">One lock, {PARTS} {place}</text>
<text class="small" x="24" y="58">{tokens}ttl {} ms; half-way one holder is killed</text>"##,
            WIDTH - 1.0,
            height - 1.0,
            TTL.as_millis(),
        )?;
        self.lanes(story)?;
        self.axis(story, floor)?;
        for wait in &story.waits {
            #[allow(clippy::cast_precision_loss, reason = "a handful")]
            let y = top(wait.part) + WAIT.0 + WAIT.2 * wait.row as f64;
            let (x, width) = (self.x(wait.from), (wait.to - wait.from) * self.scale);
            writeln!(
                self.svg,
                r#"<rect class="wait" x="{x:.1}" y="{y}" width="{:.1}" height="{}" rx="3"/>"#,
                width.max(1.0),
                WAIT.1,
            )?;
        }
        for (place, hold) in (1..).zip(&story.holds) {
            self.hold(place, hold)?;
        }
        self.kill(story)?;
        self.legend(floor + 62.0)?;
        writeln!(self.svg, "</svg>")
    }

    fn lanes(&mut self, story: &Story) -> std::fmt::Result {
        for (number, part) in ALL.iter().enumerate() {
            let y = top(number);
            writeln!(
                self.svg,
                r#"<g class="process"><rect class="lane" x="{LEFT}" y="{}" width="{}" height="{}" rx="4"/>
<text class="name" x="24" y="{}">process {}</text><text class="small" x="24" y="{}">{}</text></g>"#,
                y + 3.0,
                WIDTH - LEFT - RIGHT,
                LANE - 6.0,
                y + 32.0,
                number + 1,
                y + 52.0,
                part.describe(),
            )?;
        }
        if let Some(killed) = story.killed {
            let x = self.x(killed);
            writeln!(
                self.svg,
                r#"<rect class="gone" x="{x:.1}" y="{}" width="{:.1}" height="{}"/>"#,
                top(VICTIM) + 3.0,
                WIDTH - RIGHT - x,
                LANE - 6.0,
            )?;
        }
        Ok(())
    }

    fn axis(&mut self, story: &Story, floor: f64) -> std::fmt::Result {
        let mut at = 0.0;
        while at <= story.lasts {
            let x = self.x(at);
            writeln!(
                self.svg,
                r#"<line class="grid" x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{}"/><text class="small middle" x="{x:.1}" y="{}">{at:.0}{}</text>"#,
                floor + 4.0,
                floor + 20.0,
                if at == 0.0 { " ms" } else { "" },
            )?;
            at += 250.0;
        }
        Ok(())
    }

    fn hold(&mut self, place: usize, hold: &Hold) -> std::fmt::Result {
        let (class, end) = match (hold.end, hold.passed) {
            (End::Lost, _) => ("lost", "lost"),
            (End::Killed, _) => ("hold", "killed"),
            (End::Released, true) => ("passed", "released"),
            (End::Released, false) => ("hold", "released"),
        };
        let (x, y) = (self.x(hold.from), top(hold.part) + BAR.0);
        let width = ((hold.to - hold.from) * self.scale).max(2.0);
        let passed = if hold.passed {
            "passed on"
        } else {
            "from the store"
        };
        writeln!(
            self.svg,
            r#"<g data-process="{}" data-token="{}" data-from="{:.1}" data-to="{:.1}" data-end="{end}"><title>lease {place}, token {}, {passed}, {end} after {:.0} ms</title><rect class="{class}" x="{x:.1}" y="{y}" width="{width:.1}" height="{}" rx="3"/>"#,
            hold.part + 1,
            hold.token,
            hold.from,
            hold.to,
            hold.token,
            hold.to - hold.from,
            BAR.1,
        )?;
        let middle = y + BAR.1 / 2.0;
        if hold.passed {
            let (near, far) = (x + 2.0, x + 7.0);
            writeln!(
                self.svg,
                r#"<path class="pass" d="M{near:.1} {} L{far:.1} {middle} L{near:.1} {} Z"/>"#,
                middle - 5.0,
                middle + 5.0,
            )?;
        }
        for renewed in &hold.renewed {
            let x = self.x(*renewed).max(x + 5.0);
            let y = y + BAR.1 - 6.0;
            writeln!(
                self.svg,
                r#"<circle class="renewed" cx="{x:.1}" cy="{y}" r="3"/>"#
            )?;
        }
        if hold.end == End::Lost {
            self.cross(x + width - 10.0, middle)?;
        }
        if width > 16.0 {
            // Beside its mark, if there is one.
            let aside = match (hold.end, hold.passed) {
                (End::Lost, _) => -6.0,
                (_, true) => 4.0,
                _ => 0.0,
            };
            writeln!(
                self.svg,
                r#"<text class="token" x="{:.1}" y="{}">{place}</text>"#,
                x + width / 2.0 + aside,
                middle + 4.5,
            )?;
        }
        writeln!(self.svg, "</g>")
    }

    fn cross(&mut self, x: f64, y: f64) -> std::fmt::Result {
        let (left, right, up, down) = (x - 4.0, x + 4.0, y - 4.0, y + 4.0);
        writeln!(
            self.svg,
            r#"<path class="cross" d="M{left:.1} {up} L{right:.1} {down} M{right:.1} {up} L{left:.1} {down}"/>"#
        )
    }

    /// The kill, and the lease that runs out after it.
    fn kill(&mut self, story: &Story) -> std::fmt::Result {
        let (Some(killed), Some(((_, dead), (_, next)))) = (story.killed, story.takeover()) else {
            return Ok(());
        };
        let (x, end, y) = (self.x(killed), self.x(next.from), top(VICTIM));
        writeln!(
            self.svg,
            r#"<g class="killed" data-at="{killed:.1}" data-token="{}"><rect class="dead" x="{x:.1}" y="{}" width="{:.1}" height="{}"/>
<line class="kill" x1="{x:.1}" y1="{}" x2="{x:.1}" y2="{}"/>
<text class="alarm" x="{:.1}" y="{}">killed: its lease runs out, {:.0} ms</text></g>"#,
            dead.token,
            y + BAR.0,
            end - x,
            BAR.1,
            y + 2.0,
            y + LANE - 2.0,
            x + 8.0,
            y + 62.0,
            next.from - killed,
        )
    }

    fn legend(&mut self, y: f64) -> std::fmt::Result {
        let marks = [
            ("wait", "waits"),
            ("hold", "holds"),
            ("passed", "holds, passed on within the process"),
            ("renewed", "renewed"),
            ("lost", "lost: worked longer than its lease"),
            ("dead", "left by the dead"),
        ];
        let mut x = LEFT;
        for (class, words) in marks {
            let middle = y - 4.0;
            match class {
                "wait" => write!(
                    self.svg,
                    r#"<rect class="wait" x="{x:.1}" y="{}" width="22" height="6" rx="3"/>"#,
                    middle - 3.0
                )?,
                "renewed" => write!(
                    self.svg,
                    r#"<rect class="hold" x="{x:.1}" y="{}" width="22" height="16" rx="3"/><circle class="renewed" cx="{:.1}" cy="{middle}" r="3"/>"#,
                    middle - 8.0,
                    x + 11.0,
                )?,
                class => write!(
                    self.svg,
                    r#"<rect class="{class}" x="{x:.1}" y="{}" width="22" height="16" rx="3"/>"#,
                    middle - 8.0
                )?,
            }
            if class == "lost" {
                self.cross(x + 11.0, middle)?;
            }
            if class == "passed" {
                let (near, far) = (x + 8.0, x + 14.0);
                let (up, down) = (middle - 5.0, middle + 5.0);
                write!(
                    self.svg,
                    r#"<path class="pass" d="M{near:.1} {up} L{far:.1} {middle} L{near:.1} {down} Z"/>"#
                )?;
            }
            writeln!(
                self.svg,
                r#"<text x="{:.1}" y="{y}">{words}</text>"#,
                x + 30.0
            )?;
            #[allow(clippy::cast_precision_loss, reason = "some words")]
            let wide = words.len() as f64 * 6.8;
            x += 30.0 + wide + 20.0;
        }
        Ok(())
    }
}

#[allow(clippy::cast_precision_loss, reason = "a handful")]
fn top(part: usize) -> f64 {
    TOP + LANE * part as f64
}
