// Templates can call these: filters, tests, methods and functions.
#pragma once

#include <string_view>

#include "zero/data/jinja/value.h"

namespace zero::jinja {

/// `arguments.values[0]` is what the filter or the test is applied to. Return a null pointer where
/// there is none of that name.
using Builtin = Value (*)(const Arguments& arguments);
Builtin find_filter(std::string_view name);
Builtin find_test(std::string_view name);

/// Calls a method of a string or a dict. Throws Fault for one that is not known.
Value call_method(const Value& object, std::string_view name, const Arguments& arguments);

/// Returns namespace, range, dict, raise_exception and strftime_now, by name.
Dict functions();

/// Returns object[key] or object.key, which is undefined if it is absent. Throws Fault for an
/// undefined object.
Value member_of(const Value& object, const Value& key);
/// Returns object[from:to:by] of a list or a string; each of the three may be none.
Value slice_of(const Value& object, const Value& from, const Value& to, const Value& by);
/// Computes Python's operators: + - * / // % ** and ~.
Value compute(std::string_view sign, const Value& left, const Value& right);
/// Returns whether `container` has `element`.
bool contains(const Value& container, const Value& element);

}  // namespace zero::jinja
