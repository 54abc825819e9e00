// Curves, layers and bars for a page, drawn by `Chart` in the colours of the page's style.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zero::report {

/// Says a number of an axis with its unit.
enum class Unit : uint8_t { none, milliseconds, bytes };
std::string say(double value, Unit unit);

/// Numbers over steps. `x` ascends; values of `y` that are not finite are left out.
struct Curve {
  std::string name;
  std::string_view colour;
  std::vector<double> x;
  std::vector<double> y;
  bool dots = false;  ///< points instead of a line
};

struct Axis {
  Unit unit = Unit::none;
  bool may_be_logarithmic = false;  ///< it is, if values above 0 span a factor of 50
};

/// Draws curves over one axis of steps; "" if none has a point. Many steps share a column of the
/// picture: the curve is their mean, and a band reaches from the least to the most.
std::string curves(const std::string& title, const std::vector<Curve>& all, const Axis& axis);

/// Draws layers that add up, the first one at the bottom. All have the same steps.
std::string layers(const std::string& title, const std::vector<Curve>& all, const Axis& axis);

/// Draws horizontal bars, each divided into parts.
struct Bar {
  std::string name;
  std::vector<double> parts;
};
struct BarPart {
  std::string name;
  std::string_view colour;
};
std::string bars(const std::string& title, const std::vector<BarPart>& parts,
                 const std::vector<Bar>& all, Unit unit);

/// Returns the colour of a part by its number.
std::string_view part_colour(size_t number);

}  // namespace zero::report
