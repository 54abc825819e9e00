// Draws charts as SVG: single files, and pictures inside a page. Colours and measures of the files
// are those of benchmarks/draw.py. A colour may be a variable of the page's style ("var(--grid)").
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zero::report {

/// Returns `text` as HTML, SVG and their quoted attributes hold it. Bytes that are not UTF-8, and
/// control characters, become U+FFFD.
std::string escaped(std::string_view text);

/// A chart under construction. Coordinates are pixels from its upper left corner.
class Chart {
 public:
  struct Style {
    int size = 12;
    std::string_view anchor = "start";
    std::string_view colour = "#222222";
    bool bold = false;
  };
  struct Point {
    double x = 0;
    double y = 0;
  };
  void text(double x, double y, std::string_view words, const Style& style);
  void text(double x, double y, std::string_view words) { text(x, y, words, {}); }
  void box(double x, double y, double width, double height, std::string_view fill);
  /// Draws a box of which a pointer that rests on it shows `tip`.
  void box(double x, double y, double width, double height, std::string_view fill,
           std::string_view tip);
  /// Draws a line through points. A point whose `y` is not finite parts it.
  void line(const std::vector<Point>& points, std::string_view colour, double width = 1.5);
  /// Fills the area inside a line.
  void area(const std::vector<Point>& outline, std::string_view colour, double opacity);
  void dot(double x, double y, double radius, std::string_view colour);
  /// Draws an axis of `seconds` from `left` on, with at most a dozen marks in milliseconds: lines
  /// from `top` to `bottom`, and their numbers below.
  void time_axis(double left, double top, double bottom, double seconds, double pixels_a_second);
  /// Draws a row of entries, each a colour and a name.
  void legend(double x, double y,
              const std::vector<std::pair<std::string_view, std::string_view>>& entries,
              const Style& style);
  void legend(double x, double y,
              const std::vector<std::pair<std::string_view, std::string_view>>& entries) {
    legend(x, y, entries, {});
  }
  /// Returns the chart as the text of an SVG file.
  std::string svg(double width, double height, std::string_view title,
                  std::string_view caption) const;
  /// Returns the chart as an element of a page, as wide as its place there.
  std::string element(double width, double height, std::string_view title) const;

 private:
  std::string body_;
};

}  // namespace zero::report
