//! Draws the figures: stages side by side where there is room, else one to a line; below them the scopes.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};

use super::figures::{COLUMNS, Figures, Level, ScopeRow, Stage};

/// How wide a stage is if they stand side by side, and how many lines it has.
const STAGE_WIDTH: u16 = 24;
const STAGE_ROWS: u16 = 8;
/// Narrower or lower than this, nothing can be read.
const WIDTH_MIN: u16 = 20;
const HEIGHT_MIN: u16 = 4;
/// How wide a column of the scopes is.
const COLUMN: u16 = 10;
/// How wide the names of scopes are at least.
const NAME_MIN: u16 = 12;

/// What is on the screen.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'s> {
    pub url: &'s str,
    pub figures: &'s Figures,
    /// Why the server does not answer, if it does not.
    pub lost: Option<&'s str>,
    pub colours: bool,
}

fn colour(level: Level) -> Color {
    match level {
        Level::Fine => Color::Green,
        Level::Look => Color::Yellow,
        Level::Act => Color::Red,
        Level::None => Color::Reset,
    }
}

/// A place to write lines to, which never leaves its area.
struct Page<'b> {
    buffer: &'b mut Buffer,
    area: Rect,
    colours: bool,
}

impl Page<'_> {
    /// Writes a text, cut off at a width; returns the column after it.
    fn put(&mut self, x: u16, y: u16, text: &str, width: u16, style: Style) -> u16 {
        let style = if self.colours { style } else { Style { fg: None, bg: None, ..style } };
        let width = width.min(self.area.right().saturating_sub(x));
        if y >= self.area.bottom() || width == 0 {
            return x;
        }
        self.buffer.set_stringn(x, y, text, usize::from(width), style).0
    }

    /// Writes a text that ends at a column.
    fn put_right(&mut self, end: u16, y: u16, text: &str, width: u16, style: Style) {
        let length = u16::try_from(text.chars().count()).unwrap_or(u16::MAX).min(width);
        self.put(end.saturating_sub(length), y, text, length, style);
    }
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const SOFT: Style = Style::new().add_modifier(Modifier::DIM);

/// Draws it all.
pub fn draw(shown: &Shown<'_>, area: Rect, buffer: &mut Buffer) {
    let mut page = Page { buffer, area, colours: shown.colours };
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        page.put(area.x, area.y, "too small", area.width, Style::new());
        return;
    }
    let mut y = head(&mut page, shown);
    let last = area.bottom().saturating_sub(1);
    let across = area.width / STAGE_WIDTH;
    let stages = &shown.figures.stages;
    let needed = u16::try_from(stages.len()).unwrap_or(u16::MAX).div_ceil(across.max(1)) * STAGE_ROWS;
    // Below the stages there must be room for a scope and the last line.
    y = if across >= 3 && y + needed + 3 <= last {
        side_by_side(&mut page, stages, y, across.min(4))
    } else {
        one_to_a_line(&mut page, stages, y, last)
    };
    scopes(&mut page, &shown.figures.scopes, y, last);
    page.put(area.x, last, "q quits", area.width, SOFT);
}

fn head(page: &mut Page<'_>, shown: &Shown<'_>) -> u16 {
    let (area, y) = (page.area, page.area.y);
    let x = page.put(area.x, y, "hapax top", area.width, BOLD);
    let x = page.put(x + 2, y, shown.url, area.width, SOFT);
    // The ledger is counted less often if that takes long.
    let age =
        if shown.figures.age_s >= 10 { format!(", {} s ago", shown.figures.age_s) } else { String::new() };
    let as_of = format!("data as of {} UTC{age}", shown.figures.at);
    let room = area.right().saturating_sub(x + 2);
    if !shown.figures.at.is_empty() && usize::from(room) >= as_of.len() {
        page.put_right(area.right(), y, &as_of, room, SOFT);
    }
    let Some(reason) = shown.lost else { return y + 2 };
    let bad = BOLD.fg(Color::Red);
    let before = if shown.figures.at.is_empty() { "" } else { " What you see is from before." };
    page.put(area.x, y + 1, &format!("The server does not answer; asking again.{before}"), area.width, bad);
    page.put(area.x, y + 2, reason, area.width, SOFT);
    y + 4
}

fn side_by_side(page: &mut Page<'_>, stages: &[Stage], top: u16, across: u16) -> u16 {
    let width = page.area.width / across;
    let mut bottom = top;
    for (at, stage) in (0u16..).zip(stages) {
        let (x, y) = (page.area.x + at % across * width, top + at / across * STAGE_ROWS);
        let inner = width.saturating_sub(3);
        let style = BOLD.fg(colour(stage.level));
        let after = page.put(x, y, stage.name, inner, style);
        if matches!(stage.level, Level::Look | Level::Act) {
            page.put(after, y, &format!(" ({})", stage.level.word()), inner, style);
        }
        let after = page.put(x, y + 1, &stage.figure, inner, BOLD);
        page.put(after + 1, y + 1, stage.unit, (x + inner).saturating_sub(after + 1), SOFT);
        for (row, (name, value)) in (2u16..STAGE_ROWS - 1).zip(&stage.rows) {
            let length = u16::try_from(value.chars().count()).unwrap_or(u16::MAX).min(inner);
            page.put(x, y + row, name, inner.saturating_sub(length + 1), SOFT);
            page.put_right(x + inner, y + row, value, length, Style::new());
        }
        bottom = y + STAGE_ROWS;
    }
    bottom
}

fn one_to_a_line(page: &mut Page<'_>, stages: &[Stage], top: u16, last: u16) -> u16 {
    let (x, right) = (page.area.x, page.area.right());
    let mut y = top;
    for stage in stages {
        if y >= last {
            return y;
        }
        page.put(x, y, stage.level.word(), 5, BOLD.fg(colour(stage.level)));
        page.put(x + 5, y, stage.name, 12, Style::new());
        let after = page.put(x + 18, y, &stage.figure, right.saturating_sub(x + 18), BOLD);
        let mut after = page.put(after + 1, y, stage.unit, right.saturating_sub(after + 1), SOFT);
        for (name, value) in &stage.rows {
            let more = format!(" · {name} {value}");
            let length = u16::try_from(more.chars().count()).unwrap_or(u16::MAX);
            if after.saturating_add(length) > right {
                break; // half a number would be another number
            }
            after = page.put(after, y, &more, length, SOFT);
        }
        y += 1;
    }
    y + 1
}

fn scopes(page: &mut Page<'_>, scopes: &[ScopeRow], top: u16, last: u16) {
    if top + 1 >= last {
        return;
    }
    let (x, right) = (page.area.x, page.area.right());
    if scopes.is_empty() {
        page.put(x, top, "No scope has claimed an event yet.", page.area.width, SOFT);
        return;
    }
    // The first columns matter most; what has no room is left out.
    let room = usize::from(page.area.width.saturating_sub(NAME_MIN) / COLUMN);
    let shown = room.saturating_sub(1).min(COLUMNS.len());
    let name = page.area.width.saturating_sub((u16::try_from(shown).unwrap_or(0) + 1) * COLUMN);
    let end = |column: usize| x + name + (u16::try_from(column).unwrap_or(0) + 1) * COLUMN;
    page.put(x, top, "scope", name, SOFT);
    for (column, (head, _)) in COLUMNS.iter().take(shown).enumerate() {
        page.put_right(end(column), top, head, COLUMN - 1, SOFT);
    }
    page.put_right(end(shown).min(right), top, "done/s", COLUMN - 1, SOFT);
    let lines = usize::from(last - top - 1);
    let rest = scopes.len().saturating_sub(lines);
    let shown_scopes = if rest > 0 { lines.saturating_sub(1) } else { lines };
    for (y, scope) in (top + 1..last).zip(scopes.iter().take(shown_scopes)) {
        let room = name.saturating_sub(1);
        let after = page.put(x, y, &scope.name, room, Style::new());
        if scope.name.chars().count() > usize::from(room) {
            page.put(after.saturating_sub(1), y, "…", 1, Style::new()); // the rest is not shown
        }
        for (column, count) in scope.counts.iter().take(shown).enumerate() {
            let alarm = COLUMNS[column].0 == "dead" && *count > 0;
            let style = if alarm {
                BOLD.fg(Color::Red)
            } else if *count == 0 {
                SOFT
            } else {
                Style::new()
            };
            page.put_right(end(column), y, &fitting(*count), COLUMN - 1, style);
        }
        page.put_right(end(shown).min(right), y, &scope.done_per_s, COLUMN - 1, Style::new());
    }
    if rest > 0 {
        let more = format!("{} more scopes", scopes.len() - shown_scopes);
        page.put(x, last - 1, &more, page.area.width, SOFT);
    }
}

/// A number that fits its column whole: one that is cut off would be another one.
fn fitting(count: u64) -> String {
    match count {
        0..10_000_000 => crate::print::grouped(count),
        10_000_000..10_000_000_000 => format!("{}M", crate::print::grouped(count / 1_000_000)),
        _ => format!("{}G", crate::print::grouped(count / 1_000_000_000)),
    }
}

/// The same as lines, where there is no terminal.
pub fn lines(shown: &Shown<'_>, width: u16) -> Vec<String> {
    let scopes = u16::try_from(shown.figures.scopes.len()).unwrap_or(u16::MAX);
    let stages = u16::try_from(shown.figures.stages.len()).unwrap_or(u16::MAX);
    let area = Rect::new(0, 0, width, scopes.saturating_add(stages).saturating_add(6));
    let mut buffer = Buffer::empty(area);
    draw(&Shown { colours: false, ..*shown }, area, &mut buffer);
    let line = |y: u16| -> String { (0..width).map(|x| buffer[(x, y)].symbol()).collect() };
    let mut lines: Vec<String> = (0..area.height - 1).map(|y| line(y).trim_end().to_owned()).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::figures::Samples;
    use super::super::figures::tests::answer;
    use super::*;

    fn screen(figures: &Figures, lost: Option<&str>, width: u16, height: u16) -> Vec<String> {
        let area = Rect::new(0, 0, width, height);
        let mut buffer = Buffer::empty(area);
        draw(&Shown { url: "http://127.0.0.1:7070", figures, lost, colours: true }, area, &mut buffer);
        (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect()).collect()
    }

    fn figures(scope: &str) -> Figures {
        let mut samples = Samples::default();
        samples.add(Instant::now(), answer(1_234_567, scope));
        samples.figures()
    }

    #[test]
    fn a_wide_terminal_shows_stages_side_by_side_and_a_narrow_one_below_each_other() {
        let figures = figures("mailer");
        let wide = screen(&figures, None, 100, 30);
        assert!(wide[0].contains("data as of 05:20:14 UTC"), "{wide:#?}");
        assert!(wide[2].contains("Keyed write") && wide[2].contains("Bus (look)"), "{wide:#?}");
        assert!(
            wide.iter().any(|line| line.starts_with("mailer") && line.contains("1,234,567")),
            "{wide:#?}"
        );
        let narrow = screen(&figures, None, 60, 14);
        assert!(
            narrow[2].starts_with("ok   Keyed write") && narrow[7].starts_with("act  Effects"),
            "{narrow:#?}"
        );
        assert!(narrow[11].starts_with("mailer"), "{narrow:#?}");
        // The worst columns stay.
        let heads = &narrow[10];
        assert!(heads.contains("dead") && heads.contains("done/s") && !heads.contains("stale"), "{heads}");
    }

    /// Every size can be drawn, and the figures never run into each other.
    #[test]
    fn every_size_can_be_drawn() {
        let figures = figures("mailer");
        for width in 1..130 {
            for height in [1, 2, 3, 4, 5, 9, 24, 40] {
                let lines = screen(&figures, Some("connection refused"), width, height);
                if width >= WIDTH_MIN && height >= HEIGHT_MIN {
                    assert!(lines[1].starts_with("The server does not"), "{width}x{height} {lines:#?}");
                    assert!(lines.last().unwrap().starts_with("q quits"), "{width}x{height} {lines:#?}");
                }
            }
        }
    }

    #[test]
    fn more_scopes_than_fit_are_counted() {
        let mut figures = figures("mailer");
        figures.scopes =
            (0..30).map(|n| ScopeRow { name: format!("s{n}"), ..figures.scopes[0].clone() }).collect();
        let lines = screen(&figures, None, 80, 20);
        assert!(lines[18].starts_with("23 more scopes"), "{lines:#?}");
        assert!(lines[17].starts_with("s6 "), "{lines:#?}");
    }

    /// Nothing that a name contains reaches the terminal as anything but text.
    #[test]
    fn hostile_names_are_escaped_and_break_no_line() {
        let long = "漢".repeat(255);
        for hostile in [
            "\u{1b}[2J\u{1b}]0;pwned\u{7}",
            "invoice\u{202e}gpj.exe\u{2066}",
            "a\nb\tc\r",
            "\u{9b}31m",
            &long,
        ] {
            let figures = figures(hostile);
            for (width, height) in [(100, 30), (60, 14), (24, 12)] {
                for line in screen(&figures, Some(&crate::print::escaped(hostile)), width, height) {
                    let odd = |c: char| c.is_control() || "\u{202e}\u{2066}".contains(c);
                    assert!(!line.contains(odd), "{line:?}");
                }
            }
        }
    }

    #[test]
    fn every_count_fits_its_column() {
        for count in [0, 9_999_999, 10_000_000, 9_999_999_999, 10_000_000_000, u64::MAX / 1_000_000] {
            assert!(fitting(count).len() < usize::from(COLUMN), "{}", fitting(count));
        }
        assert_eq!(fitting(12_345_678), "12M");
    }

    #[test]
    fn lines_have_everything_and_no_colours() {
        let figures = figures("mailer");
        let lines = lines(&Shown { url: "http://h", figures: &figures, lost: None, colours: true }, 100);
        assert!(lines[0].starts_with("hapax top  http://h"), "{lines:#?}");
        assert!(lines.iter().any(|line| line.starts_with("acme/billing")), "{lines:#?}");
        assert!(!lines.iter().any(|line| line.contains("q quits")), "{lines:#?}");
    }
}
