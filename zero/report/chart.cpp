#include "zero/report/chart.h"

#include <fmt/format.h>
#include <utf8cpp/utf8.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace zero::report {

std::string escaped(std::string_view text) {
  std::string whole;
  utf8::replace_invalid(text.begin(), text.end(), std::back_inserter(whole));
  std::string result;
  for (const char c : whole) {
    const bool control = static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t';
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (c == '"') {
      result += "&quot;";
    } else if (c == '\'') {
      result += "&#39;";
    } else if (control || c == 0x7f) {
      result += "\xef\xbf\xbd";
    } else {
      result += c;
    }
  }
  return result;
}

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

void Chart::box(double x, double y, double width, double height, std::string_view fill,
                std::string_view tip) {
  body_ += fmt::format(
      "<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}' fill='{}'><title>{}</title>"
      "</rect>\n",
      x, y, width, height, fill, escaped(tip));
}

void Chart::line(const std::vector<Point>& points, std::string_view colour, double width) {
  std::string path;
  bool joined = false;
  for (const auto& [x, y] : points) {
    if (std::isfinite(y)) path += fmt::format("{}{:.1f} {:.1f}", joined ? 'L' : 'M', x, y);
    joined = std::isfinite(y);
  }
  body_ += fmt::format(
      "<path d='{}' fill='none' stroke='{}' stroke-width='{}' stroke-linejoin='round' "
      "stroke-linecap='round'/>\n",
      path, colour, width);
}

void Chart::area(const std::vector<Point>& outline, std::string_view colour, double opacity) {
  std::string path;
  for (const auto& [x, y] : outline)
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? 'M' : 'L', x, y);
  body_ += fmt::format("<path d='{}Z' fill='{}' fill-opacity='{}'/>\n", path, colour, opacity);
}

void Chart::dot(double x, double y, double radius, std::string_view colour) {
  body_ +=
      fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='{:.1f}' fill='{}'/>\n", x, y, radius, colour);
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
                   const std::vector<std::pair<std::string_view, std::string_view>>& entries,
                   const Style& style) {
  for (const auto& [colour, name] : entries) {
    box(x, y, 12, 12, colour);
    text(x + 18, y + 10, name, style);
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

std::string Chart::element(double width, double height, std::string_view title) const {
  return fmt::format("<svg viewBox='0 0 {:.0f} {:.0f}' role='img' aria-label='{}'>\n{}</svg>\n",
                     width, height, escaped(title), body_);
}

}  // namespace zero::report
