//! Tables that fit the terminal.
//!
//! People copy ids, so an id never wraps and is never hidden. A table that is too wide first wraps
//! its texts, then hides its details. Output to a file or a program has every column, and one line
//! per row.

use comfy_table::{Attribute, Cell, ColumnConstraint, ContentArrangement, Table, Width, presets};

use super::sanitize_line;

/// Spaces between two columns.
const GAP: u16 = 2;

/// Minimum width of a text that wraps.
const MIN_TEXT_WIDTH: u16 = 12;

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    header: &'static str,
    fit: ColumnFit,
}

/// The treatment of a column in a table that is too wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnFit {
    /// Stays as it is.
    Whole,
    /// Wraps.
    Wrapped,
    /// Is hidden. The column with the lowest rank is hidden first.
    Hidden { rank: u8 },
    /// Wraps, and is hidden if that is not enough.
    WrappedOrHidden { rank: u8 },
}

impl Column {
    /// Creates a column whose content is copied or compared: it neither wraps nor disappears.
    pub const fn id(header: &'static str) -> Self {
        Self { header, fit: ColumnFit::Whole }
    }

    /// Creates a column of text that wraps.
    pub const fn text(header: &'static str) -> Self {
        Self { header, fit: ColumnFit::Wrapped }
    }

    /// Creates a column that is hidden in a narrow terminal. The column with the lowest rank is
    /// hidden first.
    pub const fn detail(header: &'static str, rank: u8) -> Self {
        Self { header, fit: ColumnFit::Hidden { rank } }
    }

    /// Creates a column of text that wraps, and that is hidden in a terminal that is too narrow for
    /// that. The column with the lowest rank is hidden first.
    pub const fn optional_text(header: &'static str, rank: u8) -> Self {
        Self { header, fit: ColumnFit::WrappedOrHidden { rank } }
    }

    fn wraps(self) -> bool {
        matches!(self.fit, ColumnFit::Wrapped | ColumnFit::WrappedOrHidden { .. })
    }

    /// Returns the smallest width at which the column is readable.
    fn min_width(self, content_width: u16) -> u16 {
        let header_width = u16::try_from(self.header.len()).unwrap_or(u16::MAX);
        match self.wraps() {
            true => content_width.min(header_width.max(MIN_TEXT_WIDTH)),
            false => content_width,
        }
    }
}

/// A table as text.
pub(super) struct RenderedTable {
    pub text: String,
    /// Headers of the columns that are hidden because the terminal is too narrow.
    pub hidden: Vec<&'static str>,
}

/// Renders a table that is at most `width` wide, or as wide as its content without a limit.
pub(super) fn render_table(
    columns: &[Column],
    rows: &[Vec<String>],
    bold_header: bool,
    width: Option<u16>,
) -> RenderedTable {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).force_no_tty();
    if bold_header {
        table.enforce_styling();
    }
    let header_cell = |column: &Column| {
        let cell = Cell::new(column.header);
        if bold_header { cell.add_attribute(Attribute::Bold) } else { cell }
    };
    table.set_header(columns.iter().map(header_cell));
    for row in rows {
        table.add_row(row.iter().map(|cell| sanitize_line(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP));
    }
    let mut hidden = Vec::new();
    match width {
        None => {
            table.set_content_arrangement(ContentArrangement::Disabled);
        }
        Some(width) => {
            // The gap after the last column is trimmed, so it may exceed the width.
            let width = width.saturating_add(GAP);
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
            let content_widths = table.column_max_content_widths();
            let is_hidden = hidden_columns(columns, &content_widths, width);
            for (index, column) in columns.iter().enumerate() {
                let min = column.min_width(content_widths.get(index).copied().unwrap_or_default());
                let constraint = if is_hidden[index] {
                    hidden.push(column.header);
                    ColumnConstraint::Hidden
                } else if column.wraps() {
                    ColumnConstraint::LowerBoundary(Width::Fixed(min.saturating_add(GAP)))
                } else {
                    ColumnConstraint::ContentWidth
                };
                if let Some(column) = table.column_mut(index) {
                    column.set_constraint(constraint);
                }
            }
        }
    }
    let text = table.trim_fmt();
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    RenderedTable { text: lines.join("\n"), hidden }
}

/// Decides which details to hide, so that all other columns fit at their minimum widths.
fn hidden_columns(columns: &[Column], content_widths: &[u16], width: u16) -> Vec<bool> {
    let mut is_hidden = vec![false; columns.len()];
    let min_widths = columns.iter().zip(content_widths);
    let min_widths: Vec<u32> = min_widths
        .map(|(column, content)| u32::from(column.min_width(*content)) + u32::from(GAP))
        .collect();
    let mut details: Vec<(u8, usize)> = columns
        .iter()
        .enumerate()
        .filter_map(|(index, column)| match column.fit {
            ColumnFit::Hidden { rank } | ColumnFit::WrappedOrHidden { rank } => Some((rank, index)),
            ColumnFit::Whole | ColumnFit::Wrapped => None,
        })
        .collect();
    details.sort_unstable();
    for (_, index) in details {
        let shown = min_widths.iter().zip(&is_hidden).filter(|(_, is_hidden)| !**is_hidden);
        if shown.map(|(min, _)| *min).sum::<u32>() <= u32::from(width) {
            break;
        }
        is_hidden[index] = true;
    }
    is_hidden
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] = [
        Column::detail("AGE", 1),
        Column::text("TOOL"),
        Column::detail("ERROR", 2),
        Column::id("ID"),
    ];

    fn rows() -> Vec<Vec<String>> {
        let long = "reports.quarterly.summary_of_all_regions";
        let id = "tc_01M7P1V4D34HE398TZXP761C7H";
        ["demo.greet", long, "天气查询天气查询天气查询天气查询天气查询"]
            .map(|tool| ["12s", tool, "UPSTREAM_UNAVAILABLE", id].map(str::to_owned).to_vec())
            .to_vec()
    }

    /// Returns the width of a line; the wide characters of these tests are two columns wide.
    fn display_width(line: &str) -> usize {
        line.chars().map(|c| if c.is_ascii() || c == '…' { 1 } else { 2 }).sum()
    }

    #[test]
    fn a_table_fits_every_terminal_that_its_ids_fit() {
        for width in 43..200 {
            let table = render_table(&COLUMNS, &rows(), false, Some(width));
            for line in table.text.lines() {
                assert!(display_width(line) <= usize::from(width), "{width}:\n{}", table.text);
            }
            let ids = table.text.matches("tc_01M7P1V4D34HE398TZXP761C7H").count();
            assert_eq!(ids, 3, "every id is in one line at {width}:\n{}", table.text);
            let shown: String = table.text.split_whitespace().collect();
            assert!(shown.contains("demo.greet"), "{width}:\n{}", table.text);
        }
    }

    #[test]
    fn an_optional_text_wraps_before_it_is_hidden() {
        let columns = [Column::optional_text("REASON", 1), Column::id("ID")];
        let row = ["a person checks every payment", "tc_01M7P1V4D34HE398TZXP761C7H"];
        let rows = [row.map(str::to_owned).to_vec()];
        let wrapped = render_table(&columns, &rows, false, Some(45));
        assert_eq!((wrapped.hidden.len(), wrapped.text.lines().count() > 2), (0, true));
        assert_eq!(render_table(&columns, &rows, false, Some(40)).hidden, ["REASON"]);
    }

    #[test]
    fn a_narrow_table_hides_details_by_rank() {
        let hidden = |width| render_table(&COLUMNS, &rows(), false, Some(width)).hidden;
        assert_eq!(hidden(200), Vec::<&str>::new());
        assert_eq!(hidden(66), ["AGE"]);
        assert_eq!(hidden(60), ["AGE", "ERROR"]);
    }

    #[test]
    fn without_a_terminal_each_row_is_one_line() {
        let table = render_table(&COLUMNS, &rows(), false, None);
        assert_eq!(table.text.lines().count(), 4, "{}", table.text);
        assert_eq!(table.hidden, Vec::<&str>::new());
    }
}
