// The table of all settings: Note [Table of settings] in settings.h. Private: it includes
// nlohmann-json.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "zero/config/field.h"
#include "zero/config/optimizers/params.h"
#include "zero/config/settings.h"

namespace zero::fields {

/// Returns the table, with one row for each key, in the order of docs/config.md.
const std::vector<Field<Settings>>& settings();

/// Returns whether `option` of `zero train` sets the parameter `key` of an optimizer.
bool stands_for_parameter(std::string_view option, std::string_view key);

/// Returns the rows of `zeropp_loco_param`, a section whose presence is a choice.
const std::vector<Field<ErrorFeedback>>& error_feedback();

/// Returns the values of `file`. It does not apply the batch rule and the further checks of
/// Settings::validate. Throws ConfigError, which names `origin`, unless the report collects.
Settings read_settings(const Json& file, std::string_view origin, Report& report,
                       const std::vector<std::string>& foreign = {});
Settings read_settings(const Json& file, std::string_view origin);

/// Returns `file` with each key under its present name, as `dump` writes it; for merging two files.
/// Throws ConfigError, which names `origin`, if two names of one key stand in it, or an old one has
/// a value that cannot be used.
Json with_present_names(Json file, std::string_view origin);

/// Returns `file` (of present names) without keys that leave their value to the run: null, or
/// "auto" unless the value is a text.
Json without_defaults(Json file);

/// Read the section `optimizer` as a value, and write it. Throw ConfigError.
Optimizer read_optimizer(const Json& section, Report& report);
Json write_optimizer(const Optimizer& optimizer);

/// Reads the section `scheduler`; none if it names no type.
std::optional<optim::Schedule> read_schedule(const Json& section, Report& report);
Json write_schedule(const optim::Schedule& schedule);

/// Returns the tables of docs/config.md.
std::string markdown();

/// Explains a key to people: values, default, cost. `key` may be an old name, an option of `zero
/// train`, or the last part of a key that no other section has. Throws ConfigError for one that is
/// not known, with the nearest.
std::string explain(std::string_view key);

/// The tables of the keys of `params`, by the name of their section's `type`.
struct ParamsTable {
  std::string title;   ///< "optimizer.params of SGD"
  std::string prefix;  ///< "optimizer.params."
  std::vector<Spec> rows;
  std::vector<Json> defaults;
};
std::vector<ParamsTable> schedule_tables();

}  // namespace zero::fields
