// Writes charts as SVG. Colours and measures are those of benchmarks/draw.py.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zero::app {

/// A chart under construction. Coordinates are pixels from its upper left corner.
class Chart {
 public:
  struct Style {
    int size = 12;
    std::string_view anchor = "start";
    std::string_view colour = "#222222";
    bool bold = false;
  };
  void text(double x, double y, std::string_view words, const Style& style);
  void text(double x, double y, std::string_view words) { text(x, y, words, {}); }
  void box(double x, double y, double width, double height, std::string_view fill);
  /// Draws an axis of `seconds` from `left` on, with at most a dozen marks in milliseconds: lines
  /// from `top` to `bottom`, and their numbers below.
  void time_axis(double left, double top, double bottom, double seconds, double pixels_a_second);
  /// Draws a row of entries, each a colour and a name.
  void legend(double x, double y,
              const std::vector<std::pair<std::string_view, std::string_view>>& entries);
  /// Returns the chart as the text of an SVG file.
  std::string svg(double width, double height, std::string_view title,
                  std::string_view caption) const;

 private:
  std::string body_;
};

}  // namespace zero::app
