#include "apps/zero/chart.h"

#include <fmt/format.h>

namespace zero::app {
namespace {

std::string escaped(std::string_view words) {
  std::string text;
  for (const char c : words) {
    if (c == '&') {
      text += "&amp;";
    } else if (c == '<') {
      text += "&lt;";
    } else if (c == '>') {
      text += "&gt;";
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

void Chart::text(double x, double y, std::string_view words, const Style& style) {
  body_ += fmt::format(
      "<text x='{:.1f}' y='{:.1f}' font-size='{}' text-anchor='{}' fill='{}' font-weight='{}' "
      "font-family='Helvetica, Arial, sans-serif'>{}</text>\n",
      x, y, style.size, style.anchor, style.colour, style.bold ? "bold" : "normal", escaped(words));
}

void Chart::box(double x, double y, double width, double height, std::string_view fill) {
  body_ += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}' fill='{}'/>\n",
                       x, y, width, height, fill);
}

void Chart::time_axis(double left, double top, double bottom, double seconds,
                      double pixels_a_second) {
  if (pixels_a_second <= 0) return;
  double mark = 1e-6;
  for (int digit = 0; seconds / mark > 12; ++digit) mark *= digit % 3 == 1 ? 2.5 : 2;
  for (int i = 0; i * mark <= seconds * (1 + 1e-9); ++i) {
    const double x = left + i * mark * pixels_a_second;
    body_ += fmt::format(
        "<line x1='{0:.1f}' y1='{1:.1f}' x2='{0:.1f}' y2='{2:.1f}' stroke='#dddddd' "
        "stroke-width='0.5'/>\n",
        x, top, bottom);
    text(x, bottom + 12, fmt::format("{:g} ms", i * mark * 1e3),
         {.size = 11, .anchor = "middle", .colour = "#555555"});
  }
}

void Chart::legend(double x, double y,
                   const std::vector<std::pair<std::string_view, std::string_view>>& entries) {
  for (const auto& [colour, name] : entries) {
    box(x, y, 12, 12, colour);
    text(x + 18, y + 10, name);
    x += 44 + 7 * static_cast<double>(name.size());
  }
}

std::string Chart::svg(double width, double height, std::string_view title,
                       std::string_view caption) const {
  Chart frame;
  frame.box(0, 0, width, height, "#ffffff");
  frame.text(16, 24, title, {.size = 16, .bold = true});
  frame.text(16, 42, caption, {.colour = "#555555"});
  return fmt::format(
             "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {0:.0f} {1:.0f}' "
             "width='{0:.0f}' height='{1:.0f}' role='img'>\n<title>{2}</title>\n",
             width, height, escaped(title)) +
         frame.body_ + body_ + "</svg>\n";
}

}  // namespace zero::app
