// Writes pages of HTML that need nothing else: no network, no script, no file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace zero::report {

/// A cell of a table. `text` is escaped.
struct Cell {
  std::string text;
  bool number = false;
  bool marked = false;
};

/// Returns a table; `head` is one row of names.
std::string table(const std::vector<std::string>& head, const std::vector<std::vector<Cell>>& rows);
std::string heading(std::string_view text);
std::string paragraph(std::string_view text);
/// Puts elements beside each other where there is room, each under its name where one is given.
struct Column {
  std::string name;
  std::string body;
};
std::string beside(const std::vector<Column>& columns);
/// Folds `body` away behind a line of text.
std::string folded(std::string_view text, const std::string& body, bool open = false);

/// Returns a page. If `refresh_seconds` is not 0, a browser loads it again after that time.
std::string page(std::string_view title, const std::string& body, int refresh_seconds);
/// The line with which each page begins behind its type.
inline constexpr std::string_view kPageMark = "<!-- A report of libzero. -->";

}  // namespace zero::report
