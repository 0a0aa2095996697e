//! Charts of a run, as SVG without a background: their greys and colours are far enough from both
//! black and white, and their text is in the reader's own sans-serif.

use std::fs;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::libs::{Lib, Outcome, told};
use crate::report::{Report, shown};
use crate::scenarios::Scenario;

const SIZE: (u32, u32) = (860, 380);
pub(crate) const FONT: &str = "sans-serif";

/// As far from white as from black.
pub(crate) const TEXT: RGBColor = RGBColor(0x78, 0x78, 0x78);

pub(crate) fn colour(lib: Lib) -> RGBColor {
    match lib {
        Lib::Lockstream => RGBColor(0x1f, 0x8f, 0xd6),
        Lib::Bare => RGBColor(0x8a, 0x8a, 0x8a),
        Lib::Rslock => RGBColor(0xd9, 0x7a, 0x1e),
        Lib::AsyncRedisLock | Lib::SqlxAdvisory => RGBColor(0x4f, 0x9d, 0x52),
        Lib::PolledTable => RGBColor(0x9b, 0x5f, 0xc0),
    }
}

/// Bars in groups: a bar a library, a group a figure.
struct Chart {
    file: &'static str,
    title: &'static str,
    scale: Scale,
    groups: Vec<(&'static str, Scenario, &'static str)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Scale {
    /// As multiples of what bare has.
    ToBare,
    /// By powers of ten, from the first on that matters.
    Tens(f64),
}

fn charts() -> [Chart; 4] {
    let free = [
        ("1 task", Scenario::Free1),
        ("8 tasks", Scenario::Free8),
        ("64 tasks", Scenario::Free64),
        ("256 tasks", Scenario::Free256),
    ];
    [
        Chart {
            file: "free.svg",
            title: "Free keys: acquire and release, as a multiple of bare SET NX PX",
            scale: Scale::ToBare,
            groups: free.map(|(name, of)| (name, of, "pairs")).into(),
        },
        Chart {
            file: "hot.svg",
            title: "One key: acquisitions a second, and those by another task than the last",
            scale: Scale::Tens(10.0),
            groups: vec![
                ("16 tasks", Scenario::HotLocal, "acquisitions"),
                ("…by another", Scenario::HotLocal, "changes"),
                ("4 processes × 4", Scenario::HotProcesses, "acquisitions"),
                ("…by another", Scenario::HotProcesses, "changes"),
            ],
        },
        Chart {
            file: "handover.svg",
            title: "From release in one process to held in another, µs",
            scale: Scale::Tens(10.0),
            groups: vec![
                ("half of them within", Scenario::Handover, "p50"),
                ("99 % within", Scenario::Handover, "p99"),
            ],
        },
        Chart {
            file: "waiting.svg",
            title: "1,000 tasks wait for a held key: commands a second at the server",
            scale: Scale::Tens(0.01),
            groups: vec![("", Scenario::Waiting1000, "commands")],
        },
    ]
}

/// Whether there is, or can be, a folder for them, before the run and not after it.
pub(crate) fn prepare(folder: &Path) -> Outcome<()> {
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))
}

/// Draws those charts that the run has figures for.
pub(crate) fn draw(folder: &Path, report: &Report) -> Outcome<()> {
    for chart in charts() {
        let bars = chart.bars(report);
        if bars.iter().all(|(_, _, value)| value.is_none()) {
            continue;
        }
        let path = folder.join(chart.file);
        let area = SVGBackend::new(&path, SIZE).into_drawing_area();
        chart
            .draw(&area, &bars)
            .and_then(|()| area.present())
            .map_err(told(chart.file))?;
    }
    Ok(())
}

/// A number short enough to stand over a bar.
fn brief(value: f64) -> String {
    match value.abs() {
        1e6.. => format!("{} M", shown((value / 1e5).round() / 10.0)),
        1e4.. => format!("{} k", shown((value / 1e2).round() / 10.0)),
        10.0.. => shown(value.round()),
        _ => shown((value * 100.0).round() / 100.0),
    }
}

type Bar = (usize, Lib, Option<f64>);
type Drawn = Result<(), DrawingAreaErrorKind<<SVGBackend<'static> as DrawingBackend>::ErrorType>>;

impl Chart {
    /// Group, library and value of each bar.
    fn bars(&self, report: &Report) -> Vec<Bar> {
        let mut bars = Vec::new();
        for (group, (_, scenario, figure)) in self.groups.iter().enumerate() {
            let bare = report.median(*scenario, Lib::Bare, figure);
            for lib in Lib::ON_REDIS {
                let value = report.median(*scenario, lib, figure);
                let value = match self.scale {
                    Scale::ToBare => value.zip(bare).map(|(value, bare)| value / bare),
                    Scale::Tens(_) => value,
                };
                bars.push((group, lib, value));
            }
        }
        bars
    }

    /// How high a value is drawn.
    fn height(&self, value: f64) -> f64 {
        match self.scale {
            Scale::ToBare => value,
            Scale::Tens(least) => (value / least).log10().max(0.0),
        }
    }

    fn axis(&self, height: f64) -> String {
        match self.scale {
            Scale::ToBare => brief(height),
            Scale::Tens(least) => brief(least * 10f64.powf(height)),
        }
    }

    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, bars: &[Bar]) -> Drawn {
        let values = bars.iter().filter_map(|(_, _, value)| *value);
        let top = values.map(|value| self.height(value)).fold(1.0, f64::max);
        let top = match self.scale {
            Scale::ToBare => top * 1.12,
            // Room for a number over the highest bar.
            Scale::Tens(_) => top.ceil() + 0.25,
        };
        let title = (FONT, 21).into_font().color(&TEXT);
        let small = (FONT, 15).into_font().color(&TEXT);
        let (legend, plot) = area.titled(self.title, title)?.split_vertically(26);
        self.draw_legend(&legend, bars)?;

        let mut chart = ChartBuilder::on(&plot)
            .margin(8)
            .x_label_area_size(24)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..self.groups.len() as f64, 0.0..top)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(TEXT.mix(0.35))
            .axis_style(TEXT)
            .label_style(small.clone())
            .x_labels(0)
            .y_labels(match self.scale {
                Scale::ToBare => 6,
                Scale::Tens(_) => top as usize + 1,
            })
            .y_label_formatter(&|height| self.axis(*height))
            .draw()?;

        let width = 0.8 / Lib::ON_REDIS.len() as f64;
        let over = small.pos(Pos::new(HPos::Center, VPos::Bottom));
        for (group, lib, value) in bars {
            let Some(value) = *value else { continue };
            let place = Lib::ON_REDIS.iter().position(|one| one == lib);
            let left = *group as f64 + 0.1 + width * place.expect("all are there") as f64;
            let height = self.height(value);
            chart.draw_series([Rectangle::new(
                [(left + 0.01, 0.0), (left + width - 0.01, height)],
                colour(*lib).filled(),
            )])?;
            chart.draw_series([Text::new(
                brief(value),
                (left + width / 2.0, height),
                over.clone(),
            )])?;
        }
        let under = (FONT, 16).into_font().color(&TEXT);
        let under = under.pos(Pos::new(HPos::Center, VPos::Top));
        for (group, (name, ..)) in self.groups.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(group as f64 + 0.5, 0.0));
            let (left, above) = plot.get_base_pixel();
            plot.draw(&Text::new(*name, (x - left, y - above + 6), under.clone()))?;
        }
        Ok(())
    }

    /// The names of the libraries, each after its colour.
    fn draw_legend(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, bars: &[Bar]) -> Drawn {
        let style = (FONT, 16).into_font().color(&TEXT);
        let style = style.pos(Pos::new(HPos::Left, VPos::Center));
        let mut left = 74;
        for lib in Lib::ON_REDIS {
            if !bars
                .iter()
                .any(|(_, one, value)| *one == lib && value.is_some())
            {
                continue;
            }
            let square = [(left, 8), (left + 12, 20)];
            area.draw(&Rectangle::new(square, colour(lib).filled()))?;
            area.draw(&Text::new(lib.name(), (left + 18, 14), style.clone()))?;
            left += 46 + 8 * lib.name().len() as i32;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Figure;
    use crate::report::Entry;

    fn report(scenario: Scenario, figure: &'static str, value: f64) -> Report {
        let entry = |lib| Entry {
            scenario,
            lib,
            rounds: vec![Ok(vec![Figure::new(figure, value, "")])],
        };
        Report {
            secs: 1.0,
            rounds: 1,
            store: crate::target::Store::Redis,
            flush: None,
            server: String::new(),
            entries: vec![entry(Lib::Lockstream), entry(Lib::Bare)],
        }
    }

    #[test]
    fn numbers_over_bars_are_brief() {
        for (value, text) in [
            (0.0, "0"),
            (0.1, "0.1"),
            (1.234, "1.23"),
            (313.5, "314"),
            (9_999.0, "9999"),
            (143_219.0, "143.2 k"),
            (1e6, "1 M"),
        ] {
            assert_eq!(brief(value), text);
        }
    }

    #[test]
    fn only_what_was_measured_is_drawn() {
        let folder = tempfile::tempdir().unwrap();
        draw(folder.path(), &report(Scenario::Free8, "pairs", 1e5)).unwrap();
        // None at all stands as a bar of no height, and its number.
        draw(
            folder.path(),
            &report(Scenario::Waiting1000, "commands", 0.0),
        )
        .unwrap();
        let mut files: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, ["free.svg", "waiting.svg"]);
        let free = fs::read_to_string(folder.path().join("free.svg")).unwrap();
        for text in ["lockstream", "bare", "8 tasks", "sans-serif"] {
            assert!(free.contains(text), "{text} is missing");
        }
        assert!(!free.contains("rslock"), "a library that was not run");
        assert!(free.ends_with("</svg>\n"));
    }
}
