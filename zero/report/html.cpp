#include "zero/report/html.h"

#include <fmt/format.h>

#include "zero/report/chart.h"

namespace zero::report {
namespace {

// The colours of parts are those of `zero bench timeline` and their like, which can be told apart
// on white and on black. On paper the colours are those of the day.
constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1b1b; --soft: #5c5c5c; --grid: #dcdcdc;
  --mark: #fff3c4; --a: #2468b0; --b: #d2691e;
  --p0: #4477aa; --p1: #66ccee; --p2: #228833; --p3: #ccbb44; --p4: #aa3377; --p5: #ee8866;
  --p6: #777777; --p7: #99ddff; --p8: #44bb99; --p9: #bbcc33; --p10: #ffaabb; --p11: #cfcfcf; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --text: #e8e8e8; --soft: #a6a6a6;
  --grid: #363b42; --mark: #4a3f12; --a: #6fb1f5; --b: #f5a35c; --p6: #9a9a9a; --p11: #5c6168; } }
@media print { :root { color-scheme: light; --page: #ffffff; --text: #000000; --soft: #444444;
  --grid: #cccccc; --mark: #eeeeee; --a: #2468b0; --b: #d2691e; --p6: #777777; --p11: #cfcfcf; }
  svg, tr, section { break-inside: avoid; } h2 { break-after: avoid; }
  body { max-width: none; -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
body { background: var(--page); color: var(--text); font: 15px/1.45 Helvetica, Arial, sans-serif;
  max-width: 1200px; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2em; margin: 1.8em 0 .6em; border-bottom: 1px solid var(--grid); }
h3 { font-size: 1em; margin: .4em 0; overflow-wrap: anywhere; }
p { margin: .4em 0; } .beside { display: grid; gap: 1em 2em;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); align-items: start; }
.beside > section { min-width: 0; overflow-x: auto; }
svg { width: 100%; max-width: 620px; height: auto; display: block; }
table { border-collapse: collapse; font-size: .9em; }
th, td { text-align: left; padding: .15em .9em .15em 0; vertical-align: top;
  border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: normal; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.m td { background: var(--mark); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .9em; }
summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 2em; color: var(--soft); font-size: .85em; }
)";

}  // namespace

std::string table(const std::vector<std::string>& head,
                  const std::vector<std::vector<Cell>>& rows) {
  // A column of numbers has its name on the right.
  const auto is_number = [&](size_t column) {
    return !rows.empty() && column < rows.front().size() && rows.front()[column].number;
  };
  std::string text = "<table><thead><tr>";
  for (size_t i = 0; i < head.size(); ++i)
    text += fmt::format("<th{}>{}</th>", is_number(i) ? " class='n'" : "", escaped(head[i]));
  text += "</tr></thead><tbody>\n";
  for (const auto& row : rows) {
    bool marked = false;
    for (const auto& cell : row) marked = marked || cell.marked;
    text += marked ? "<tr class='m'>" : "<tr>";
    for (const auto& cell : row)
      text += fmt::format("<td{}>{}</td>", cell.number ? " class='n'" : "", escaped(cell.text));
    text += "</tr>\n";
  }
  return text + "</tbody></table>\n";
}

std::string heading(std::string_view text) { return fmt::format("<h2>{}</h2>\n", escaped(text)); }

std::string paragraph(std::string_view text) { return fmt::format("<p>{}</p>\n", escaped(text)); }

std::string beside(const std::vector<Column>& columns) {
  std::string text = "<div class='beside'>\n";
  for (const auto& column : columns) {
    if (column.body.empty()) continue;
    text += "<section>";
    if (!column.name.empty()) text += fmt::format("<h3>{}</h3>\n", escaped(column.name));
    text += column.body + "</section>\n";
  }
  return text + "</div>\n";
}

std::string folded(std::string_view text, const std::string& body, bool open) {
  return fmt::format("<details{}><summary>{}</summary>\n{}</details>\n", open ? " open" : "",
                     escaped(text), body);
}

std::string page(std::string_view title, const std::string& body, int refresh_seconds) {
  const auto refresh =
      refresh_seconds > 0
          ? fmt::format("<meta http-equiv='refresh' content='{}'>\n", refresh_seconds)
          : std::string();
  // Nothing in a page may be run or fetched, whatever a log's texts say.
  return fmt::format(
      "<!DOCTYPE html>\n{}\n<html lang='en'><head><meta charset='utf-8'>\n"
      "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src "
      "'unsafe-inline'\">\n"
      "<meta name='viewport' content='width=device-width, initial-scale=1'>\n{}"
      "<title>{}</title>\n<style>{}</style></head>\n<body>\n{}</body></html>\n",
      kPageMark, refresh, escaped(title), kStyle, body);
}

}  // namespace zero::report
