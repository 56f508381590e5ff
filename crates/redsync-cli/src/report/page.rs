//! The page around the sections: head, style, and the pieces that sections are made of.

use super::chart::{Series, css};
use std::fmt::Write;

/// A part of the page.
pub struct Section {
    pub title: &'static str,
    pub intro: String,
    /// Figures, tables and texts, as HTML.
    pub body: String,
}

/// The whole page.
pub fn page(sections: &[Section]) -> String {
    let mut html = String::new();
    let style = include_str!("style.css");
    let _ = write!(
        html,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>RedSync report</title>\n\
         <style>\n{style}</style>\n</head>\n<body>\n<h1>RedSync report</h1>\n"
    );
    for section in sections {
        let Section { title, intro, body } = section;
        let _ = write!(
            html,
            "<section>\n<h2>{title}</h2>\n<p class=\"soft\">{}</p>\n{body}\n</section>\n",
            text(intro)
        );
    }
    html.push_str("</body>\n</html>\n");
    html
}

/// Text that came from a file.
pub fn text(raw: &str) -> String {
    raw.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A chart with its title, caption and legend.
pub fn figure(title: &str, caption: &str, legend: &[(String, bool)], svg: &str) -> String {
    let mut entries = String::new();
    for (at, (name, dashed)) in legend.iter().enumerate() {
        let class = if *dashed { " class=\"dashed\"" } else { "" };
        let _ = write!(entries, "<span><i{class} style=\"background:{}\"></i>{}</span>", css(at), text(name));
    }
    format!(
        "<figure><h3>{}</h3><figcaption>{}</figcaption><div class=\"legend\">{entries}</div>{svg}</figure>\n",
        text(title),
        text(caption)
    )
}

/// The legend of lines.
pub fn legend(series: &[Series]) -> Vec<(String, bool)> {
    series.iter().map(|series| (series.name.clone(), series.dashed)).collect()
}

pub fn grid(figures: &str) -> String {
    format!("<div class=\"grid\">\n{figures}</div>\n")
}

/// A table; cells are plain text, and a column of words is left-aligned.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> = rows.into_iter().collect();
    let words = |cell: &String| cell.contains(' ') && cell.starts_with(char::is_alphabetic);
    let class = |column: usize| match rows.iter().any(|row| row.get(column).is_some_and(words)) {
        true => " class=\"text\"",
        false => "",
    };
    let line = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
        let cell = |(column, cell)| format!("<{tag}{}>{}</{tag}>", class(column), text(cell));
        format!("<tr>{}</tr>", cells.enumerate().map(cell).collect::<String>())
    };
    let mut html = String::from("<div class=\"scroll\"><table><thead>");
    html.push_str(&line("th", &mut header.iter().copied()));
    html.push_str("</thead><tbody>\n");
    for row in &rows {
        html.push_str(&line("td", &mut row.iter().map(String::as_str)));
        html.push('\n');
    }
    html.push_str("</tbody></table></div>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_cannot_become_markup() {
        let html = table(&["<b>"], [vec!["<script>alert(1)</script>".into()]]);
        assert!(!html.contains("<script") && html.contains("&lt;script&gt;"));
        let html = figure("\"><img>", "<i>", &[("<u>".into(), false)], "");
        assert!(!html.contains("<img") && !html.contains("<u>"));
    }
}
