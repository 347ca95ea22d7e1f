//! The terminal: taken over while `top` runs, and given back as it was.

use std::io::{self, IsTerminal as _, Read as _, Write};

use ratatui_core::backend::{Backend, ClearType, WindowSize};
use ratatui_core::buffer::Cell;
use ratatui_core::layout::{Position, Size};
use ratatui_core::style::{Color, Modifier};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

/// The other screen, without a cursor; and back.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";

/// The terminal while it is ours. Dropping it gives it back, also when something panics.
pub struct Taken {
    modes: Option<Termios>,
}

impl Taken {
    /// Shows the other screen; keys come one by one and are not shown. Ctrl-C stays a signal.
    pub fn take() -> io::Result<Self> {
        let mut modes = None;
        if io::stdin().is_terminal() {
            let before = tcgetattr(io::stdin())?;
            let mut ours = before.clone();
            ours.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            ours.special_codes[SpecialCodeIndex::VSUSP] = 0; // stopped, it would leave its screen behind
            tcsetattr(io::stdin(), OptionalActions::Flush, &ours)?;
            modes = Some(before);
        }
        let taken = Taken { modes };
        write(ENTER)?;
        Ok(taken)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let _ = write(LEAVE); // the terminal may be gone
        if let Some(modes) = &self.modes {
            let _ = tcsetattr(io::stdin(), OptionalActions::Flush, modes);
        }
    }
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// The keys that are pressed. The thread ends with the process, or with standard input.
pub fn keys() -> io::Result<mpsc::UnboundedReceiver<u8>> {
    let (sender, keys) = mpsc::unbounded_channel();
    std::thread::Builder::new().name("keys".into()).spawn(move || {
        for byte in io::stdin().lock().bytes().map_while(Result::ok) {
            if sender.send(byte).is_err() {
                return;
            }
        }
    })?;
    Ok(keys)
}

/// Draws cells with the escapes that every terminal of the last decades knows.
pub struct Ansi<W: Write> {
    out: W,
    size: fn() -> Option<Size>,
}

impl Ansi<io::Stdout> {
    pub fn stdout() -> Self {
        let size = || {
            let (width, height) = terminal_size::terminal_size_of(io::stdout())?;
            Some(Size::new(width.0, height.0))
        };
        Ansi { out: io::stdout(), size }
    }
}

fn code(colour: Color) -> &'static str {
    match colour {
        Color::Red => ";31",
        Color::Green => ";32",
        Color::Yellow => ";33",
        _ => "",
    }
}

impl<W: Write> Backend for Ansi<W> {
    type Error = io::Error;

    fn draw<'a, I>(&mut self, content: I) -> io::Result<()>
    where
        I: Iterator<Item = (u16, u16, &'a Cell)>,
    {
        let (mut next, mut style) = (None, None);
        let mut text = String::new();
        for (x, y, cell) in content {
            if next != Some((x, y)) {
                text.extend(["\x1b[", &(y + 1).to_string(), ";", &(x + 1).to_string(), "H"]);
            }
            if style != Some((cell.fg, cell.modifier)) {
                let bold = if cell.modifier.contains(Modifier::BOLD) { ";1" } else { "" };
                let dim = if cell.modifier.contains(Modifier::DIM) { ";2" } else { "" };
                text.extend(["\x1b[0", bold, dim, code(cell.fg), "m"]);
                style = Some((cell.fg, cell.modifier));
            }
            // Names are escaped before; whatever else finds its way here stays a character.
            let odd = cell.symbol().contains(char::is_control);
            text.push_str(if odd { "?" } else { cell.symbol() });
            // What is wider than one column moves the cursor by itself.
            next = cell.symbol().is_ascii().then_some((x + 1, y));
        }
        text.push_str("\x1b[0m");
        self.out.write_all(text.as_bytes())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        self.out.write_all(b"\x1b[?25l")
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        self.out.write_all(b"\x1b[?25h")
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN) // nothing is drawn where the cursor is
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        let Position { x, y } = position.into();
        self.out.write_all(format!("\x1b[{};{}H", y + 1, x + 1).as_bytes())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.out.write_all(b"\x1b[0m\x1b[2J")
    }

    fn clear_region(&mut self, _: ClearType) -> io::Result<()> {
        self.clear()
    }

    fn size(&self) -> io::Result<Size> {
        (self.size)().ok_or_else(|| io::Error::other("the terminal is gone"))
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize { columns_rows: self.size()?, pixels: Size::ZERO })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use ratatui_core::buffer::Buffer;
    use ratatui_core::layout::Rect;
    use ratatui_core::style::Style;

    use super::*;

    #[test]
    fn cells_become_text_and_controls_never_do() {
        let mut ansi = Ansi { out: Vec::new(), size: || Some(Size::new(9, 1)) };
        let mut cells = Buffer::empty(Rect::new(0, 0, 9, 1));
        cells.set_string(0, 0, "ok漢x", Style::new().fg(Color::Red));
        cells[(6, 0)].set_symbol("\u{1b}");
        let drawn = cells.content().iter().enumerate().map(|(x, cell)| (u16::try_from(x).unwrap(), 0, cell));
        ansi.draw(drawn.filter(|(x, ..)| *x != 3)).unwrap();
        let text = String::from_utf8(ansi.out).unwrap();
        assert!(text.starts_with("\x1b[1;1H\x1b[0;31mok漢\x1b[1;5Hx"), "{text:?}");
        assert!(text.contains('?') && !text.contains("\u{1b}\u{1b}"), "{text:?}");
    }
}
