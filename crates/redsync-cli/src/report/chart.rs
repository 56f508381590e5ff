//! Charts as SVG, for a page that may be light or dark: lines over numbers, stacked bars over names.
//! What must hold: no chart names a colour of the page; ink is the page's own, and values that cannot be drawn are left out.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Wide enough for a phone held upright to show it at half size and still be read.
const SIZE: (u32, u32) = (560, 340);
/// Stands for the page's own colour until the SVG is finished.
const INK: RGBColor = RGBColor(1, 2, 3);

/// Colours that people with any kind of colour vision tell apart, on white and on black.
pub const COLOURS: [RGBColor; 8] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x80, 0x80, 0x80),
    RGBColor(0xb8, 0xa8, 0x00),
];

/// The colour at a place in a legend, as CSS.
pub fn css(at: usize) -> String {
    let RGBColor(r, g, b) = COLOURS[at % COLOURS.len()];
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// One line.
#[derive(Debug, Default)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// The place in the legend whose colour it has; None: its own.
    pub colour: Option<usize>,
    /// A reference instead of a measurement.
    pub dashed: bool,
    /// Points only.
    pub scattered: bool,
}

/// What the axes are.
#[derive(Clone, Copy, Debug)]
pub struct Axes {
    pub x: &'static str,
    pub y: &'static str,
    pub log_x: bool,
    pub log_y: bool,
}

/// A chart of lines.
pub fn lines(axes: Axes, series: &[Series]) -> Result<String> {
    let usable = |(x, y): &(f64, f64)| {
        x.is_finite() && y.is_finite() && (!axes.log_x || *x > 0.0) && (!axes.log_y || *y > 0.0)
    };
    let at = |x: f64, log: bool| if log { x.log10() } else { x };
    let lines: Vec<Vec<(f64, f64)>> = series
        .iter()
        .map(|s| {
            s.points
                .iter()
                .filter(|p| usable(p))
                .map(|(x, y)| (at(*x, axes.log_x), at(*y, axes.log_y)))
                .collect()
        })
        .collect();
    draw(|area| {
        let all = || lines.iter().flatten();
        let x = Axis { range: range(all().map(|p| p.0), axes.log_x, false), log: axes.log_x };
        let y = Axis { range: range(all().map(|p| p.1), axes.log_y, true), log: axes.log_y };
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(16)
            .x_label_area_size(44)
            .y_label_area_size(58)
            .build_cartesian_2d(x, y)
            .map_err(said)?;
        chart
            .configure_mesh()
            .axis_style(INK.mix(0.6))
            .bold_line_style(INK.mix(0.15))
            .light_line_style(TRANSPARENT)
            .label_style(("sans-serif", 13).into_font().color(&INK))
            .x_desc(axes.x)
            .y_desc(axes.y)
            .x_label_formatter(&|x| label(*x, axes.log_x))
            .y_label_formatter(&|y| label(*y, axes.log_y))
            .draw()
            .map_err(said)?;
        for (number, (series, points)) in series.iter().zip(&lines).enumerate() {
            let colour = COLOURS[series.colour.unwrap_or(number) % COLOURS.len()];
            if series.dashed {
                let dashes = DashedLineSeries::new(points.iter().copied(), 6, 4, colour.stroke_width(2));
                chart.draw_series(dashes).map_err(said)?;
            } else if !series.scattered {
                chart
                    .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))
                    .map_err(said)?;
            }
            if !series.dashed && points.len() <= 60 {
                let dots = points.iter().map(|p| Circle::new(*p, 3, colour.filled()));
                chart.draw_series(dots).map_err(said)?;
            }
        }
        Ok(())
    })
}

/// Bars, each of parts on top of each other, lying so that long names have room.
pub fn bars(unit: &str, names: &[String], parts: &[Vec<f64>]) -> Result<String> {
    const ROW: i32 = 34;
    const LEFT: i32 = 8;
    let sum = |bar: &Vec<f64>| bar.iter().copied().filter(|x| x.is_finite()).sum::<f64>();
    let longest = parts.iter().map(sum).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let height = (names.len() as i32 * ROW + 8).max(40) as u32;
    draw_sized((SIZE.0, height), |area| {
        let width = f64::from(SIZE.0) - 100.0;
        let style = ("sans-serif", 13).into_font().color(&INK);
        for (row, (name, bar)) in names.iter().zip(parts).enumerate() {
            let top = row as i32 * ROW + 18;
            area.draw(&Text::new(name.clone(), (LEFT, top - 15), style.clone())).map_err(said)?;
            let mut x = f64::from(LEFT);
            for (number, value) in
                bar.iter().enumerate().filter(|(_, value)| value.is_finite() && **value > 0.0)
            {
                let next = x + value / longest * width;
                let corners = [(x.round() as i32, top), (next.round() as i32, top + 13)];
                area.draw(&Rectangle::new(corners, COLOURS[number % COLOURS.len()].filled()))
                    .map_err(said)?;
                x = next;
            }
            let place = (x.round() as i32 + 5, top + 6);
            let style = style.clone().pos(Pos::new(HPos::Left, VPos::Center));
            area.draw(&Text::new(format!("{} {unit}", short(sum(bar))), place, style)).map_err(said)?;
        }
        Ok(())
    })
}

/// The range of an axis, a little wider than the values; from zero if that is near and wanted.
fn range(values: impl Iterator<Item = f64>, log: bool, from_zero: bool) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
    if low > high {
        return 0.0..1.0;
    }
    // Values that are all the same need room too, or labels would show their last digits.
    let least = if log { 0.5 } else { (0.1 * high.abs()).max(1e-9) };
    let room = if high - low < 1e-6 * high.abs().max(1e-9) { least } else { 0.05 * (high - low) };
    let low = if !log && from_zero && low >= 0.0 && low < 0.6 * high { 0.0 } else { low - room };
    low..high + room
}

/// An axis with numbers where we want them.
struct Axis {
    range: std::ops::Range<f64>,
    log: bool,
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (value - self.range.start) / (self.range.end - self.range.start);
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        ticks(&self.range, self.log)
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.clone()
    }
}

/// Where an axis has its numbers: round ones, also on a logarithmic axis, whose range is in powers of ten.
fn ticks(range: &std::ops::Range<f64>, log: bool) -> Vec<f64> {
    let within = |x: &f64| (range.start - 1e-9..=range.end + 1e-9).contains(x);
    let span = range.end - range.start;
    if !log {
        let rough = span / 6.0;
        let power = 10f64.powf(rough.max(f64::MIN_POSITIVE).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let first = (range.start / step).ceil();
        return (0..12).map(|n| (first + f64::from(n)) * step).filter(within).collect();
    }
    let (digits, every): (&[f64], usize) = match span {
        span if span < 1.0 => (&[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0], 1),
        span if span < 2.5 => (&[1.0, 2.0, 5.0], 1),
        span => (&[1.0], (span / 7.0).ceil() as usize),
    };
    let powers = (range.start.floor() as i32..=range.end.ceil() as i32).step_by(every);
    let at = |power: i32| digits.iter().map(move |digit| f64::from(power) + digit.log10());
    powers.flat_map(at).filter(within).collect()
}

fn label(value: f64, log: bool) -> String {
    short(if log { 10f64.powf(value) } else { value })
}

/// A number in few letters.
pub fn short(x: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let digits = |x: f64| {
        let text = match x.abs() {
            y if y >= 100.0 => format!("{x:.0}"),
            y if y >= 10.0 => format!("{x:.1}"),
            y if y >= 0.1 || y == 0.0 => format!("{x:.2}"),
            y if y >= 0.001 => format!("{x:.4}"),
            _ => format!("{x:.1e}"),
        };
        match text.contains('.') && !text.contains('e') {
            true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
            false => text,
        }
    };
    match units.iter().find(|(unit, _)| x.abs() >= *unit && x.abs() >= 10_000.0) {
        Some((unit, letter)) => digits(x / unit) + letter,
        None => digits(x),
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw(paint: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    draw_sized(SIZE, paint)
}

fn draw_sized(size: (u32, u32), paint: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        paint(&area)?;
        area.present().map_err(said)?;
    }
    // Inside a page the name space is known, and it would look like an address.
    let svg = svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    Ok(svg.replace("\"#010203\"", "\"currentColor\"").trim().to_string())
}

fn said(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Axes = Axes { x: "x", y: "y", log_x: false, log_y: false };

    #[test]
    fn ink_is_the_pages_and_nothing_is_fetched() {
        let series = [Series { name: "a".into(), points: vec![(0.0, 1.0), (1.0, 2.0)], ..Series::default() }];
        let svg = lines(PLAIN, &series).unwrap();
        assert!(svg.contains("currentColor") && !svg.contains("#010203") && !svg.contains("http"));
        assert!(svg.to_lowercase().contains(&css(0)), "{svg}");
    }

    #[test]
    fn values_that_cannot_be_drawn_are_left_out() {
        let points = vec![(1.0, f64::NAN), (2.0, 0.0), (3.0, 1.0), (f64::INFINITY, 1.0)];
        let series = [Series { name: "a".into(), points, ..Series::default() }];
        let svg = lines(Axes { log_y: true, ..PLAIN }, &series).unwrap();
        assert_eq!(svg.matches("<circle").count(), 1);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        lines(PLAIN, &[]).unwrap();
        bars("ms", &["a".into()], &[vec![f64::NAN, 0.0]]).unwrap();
    }

    #[test]
    fn axes_have_round_numbers() {
        let labels = |range, log| ticks(&range, log).iter().map(|x| label(*x, log)).collect::<Vec<_>>();
        assert_eq!(labels(0.0..1.3, false), ["0", "0.5", "1"]);
        assert_eq!(labels(-0.7..15.7, false), ["0", "5", "10", "15"]);
        assert_eq!(labels(-0.15..3.16, true), ["1", "10", "100", "1000"]);
        assert_eq!(labels(5.9..9.3, true), ["1M", "10M", "100M", "1G"]);
        assert_eq!(labels(-0.3..1.0, true), ["1", "2", "5", "10"]);
        assert_eq!(labels(0.0..20.0, true).len(), 7);
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [0.0, 0.5, 12.34, 123.4, 1234.0, 12_345.0, 58_834_944.0, 0.00001];
        assert_eq!(numbers.map(short), ["0", "0.5", "12.3", "123", "1234", "12.3k", "58.8M", "1.0e-5"]);
    }
}
