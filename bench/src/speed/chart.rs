//! Small charts side by side, bars from left to right: a bar a library, the number at its end.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Speed, short};
use crate::libs::{Lib, Outcome, told};
use crate::plot::{FONT, TEXT, colour};
use crate::scenarios::Scenario;

const PANEL: (u32, u32) = (430, 146);
const COLUMNS: usize = 2;

/// Where bars begin, and how long the longest can be.
const LEFT: i32 = 128;
const LENGTH: i32 = 220;

/// Where the first bar is, and how far it is from one to the next.
const TOP: i32 = 30;
const ROW: i32 = 22;
const BAR: i32 = 15;

struct Panel {
    title: &'static str,
    scenario: Scenario,
    figure: &'static str,
    scale: Scale,
}

#[derive(Clone, Copy)]
enum Scale {
    FromZero,
    /// By powers of ten, from this one on.
    Tens(f64),
}

const PANELS: [Panel; 8] = [
    Panel {
        title: "Free keys, 1 task: pairs a second",
        scenario: Scenario::Free1,
        figure: "pairs",
        scale: Scale::FromZero,
    },
    Panel {
        title: "Free keys, 64 tasks: pairs a second",
        scenario: Scenario::Free64,
        figure: "pairs",
        scale: Scale::FromZero,
    },
    Panel {
        title: "One key, 16 tasks: acquisitions a second",
        scenario: Scenario::HotLocal,
        figure: "acquisitions",
        scale: Scale::Tens(1.0),
    },
    Panel {
        title: "… by another task than the last",
        scenario: Scenario::HotLocal,
        figure: "changes",
        scale: Scale::Tens(1.0),
    },
    Panel {
        title: "One key, 4 processes × 4 tasks: acquisitions a second",
        scenario: Scenario::HotProcesses,
        figure: "acquisitions",
        scale: Scale::Tens(1.0),
    },
    Panel {
        title: "… by another task than the last",
        scenario: Scenario::HotProcesses,
        figure: "changes",
        scale: Scale::Tens(1.0),
    },
    Panel {
        title: "Release here to held there, µs (less is better)",
        scenario: Scenario::Handover,
        figure: "p50",
        scale: Scale::Tens(10.0),
    },
    Panel {
        title: "1,000 tasks wait: commands a second (less is better)",
        scenario: Scenario::Waiting1000,
        figure: "commands",
        scale: Scale::Tens(0.1),
    },
];

/// The picture, as SVG.
pub(super) fn draw(speed: &Speed) -> Outcome<String> {
    let rows = PANELS.len().div_ceil(COLUMNS);
    let size = (PANEL.0 * COLUMNS as u32, PANEL.1 * rows as u32);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        for (panel, area) in PANELS.iter().zip(area.split_evenly((rows, COLUMNS))) {
            panel.draw(&area, speed).map_err(told(panel.title))?;
        }
        area.present().map_err(told("docs/speed.svg"))?;
    }
    Ok(text)
}

type Drawn = Result<(), DrawingAreaErrorKind<<SVGBackend<'static> as DrawingBackend>::ErrorType>>;

impl Panel {
    /// The value at the right end.
    fn most(&self, values: impl Iterator<Item = f64>) -> f64 {
        let most = values.fold(0.0, f64::max);
        match self.scale {
            Scale::FromZero => most.max(1.0),
            Scale::Tens(least) => {
                let tens = (most / least).max(1.0).log10().ceil().max(1.0);
                least * 10f64.powf(tens)
            }
        }
    }

    /// How far from the left a value is.
    fn length(&self, value: f64, most: f64) -> i32 {
        let part = match self.scale {
            Scale::FromZero => value / most,
            Scale::Tens(least) => (value / least).max(1.0).log10() / (most / least).log10(),
        };
        (part * f64::from(LENGTH)).round() as i32
    }

    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, speed: &Speed) -> Drawn {
        let values: Vec<(Lib, Option<f64>)> = Lib::ON_REDIS
            .into_iter()
            .map(|lib| (lib, speed.median(self.scenario, lib, self.figure)))
            .collect();
        let most = self.most(values.iter().filter_map(|(_, value)| *value));
        let style = |size: i32, horizontal, vertical| {
            let style = (FONT, size).into_font().color(&TEXT);
            style.pos(Pos::new(horizontal, vertical))
        };
        let title = style(15, HPos::Left, VPos::Top);
        area.draw(&Text::new(self.title, (8, 6), title))?;

        let bottom = TOP + ROW * Lib::ON_REDIS.len() as i32;
        let line = |from, to| PathElement::new(vec![from, to], TEXT.mix(0.6));
        area.draw(&line((LEFT, TOP - 2), (LEFT, bottom)))?;
        if let Scale::Tens(least) = self.scale {
            area.draw(&line((LEFT, bottom), (LEFT + LENGTH, bottom)))?;
            let tens = (most / least).log10().round() as i32;
            for value in (0..=tens).map(|ten| least * 10f64.powi(ten)) {
                let x = LEFT + self.length(value, most);
                area.draw(&line((x, bottom), (x, bottom + 4)))?;
                let under = style(11, HPos::Center, VPos::Top);
                area.draw(&Text::new(short(value), (x, bottom + 5), under))?;
            }
        }
        for (row, (lib, value)) in values.into_iter().enumerate() {
            let top = TOP + ROW * row as i32 + (ROW - BAR) / 2;
            let middle = top + BAR / 2 + 1;
            let before = style(14, HPos::Right, VPos::Center);
            area.draw(&Text::new(lib.name(), (LEFT - 8, middle), before))?;
            let length = value.map_or(0, |value| self.length(value, most));
            let corners = [(LEFT, top), (LEFT + length, top + BAR)];
            area.draw(&Rectangle::new(corners, colour(lib).filled()))?;
            let number = value.map_or("failed".to_owned(), short);
            let after = style(14, HPos::Left, VPos::Center);
            area.draw(&Text::new(number, (LEFT + length + 5, middle), after))?;
        }
        Ok(())
    }
}
