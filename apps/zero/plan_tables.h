// The tables of `zero plan` beside the candidates.
#pragma once

#include "apps/zero/plan_options.h"
#include "zero/models/language/language_model.h"

namespace zero::app::planning {

/// Prints the published rows beside what is predicted. Returns false if a tested row is further off
/// than it may be.
bool print_papers();
/// Prints the devices that are known by name.
void print_devices();
/// Prints the operators of a step on one device, with what binds each.
void print_operators(const Options& o, const LanguageModelConfig& sizes);

}  // namespace zero::app::planning
