// The table of all settings: Note [Table of settings] in settings.h. Private: it includes
// nlohmann-json.
#pragma once

#include <string>
#include <vector>

#include "zero/config/field.h"
#include "zero/config/settings.h"

namespace zero::fields {

/// One row a key, in the order of docs/config.md.
const std::vector<Field<Settings>>& settings();

/// The rows of an optimizer's `params`, and of the options of `zero train` that stand for them.
template <class Optimizer>
const std::vector<Field<Optimizer>>& hyper_parameters();
template <>
const std::vector<Field<AdamW>>& hyper_parameters<AdamW>();
template <>
const std::vector<Field<Sgd>>& hyper_parameters<Sgd>();

/// The rows of `zeropp_loco_param`, a section whose presence is a choice.
const std::vector<Field<ErrorFeedback>>& error_feedback();

/// The values of `file`, without the batch rule and what more Settings::validate checks. Throws
/// ConfigError, which names `origin`.
Settings read_settings(const Json& file, std::string_view origin,
                       const std::vector<std::string>& foreign = {});

/// The section `optimizer` as a value, and back. Throw ConfigError.
Optimizer read_optimizer(const Json& section);
Json write_optimizer(const Optimizer& optimizer);

/// The tables of docs/config.md.
std::string markdown();

}  // namespace zero::fields
