// Vector code is compiled for several instruction sets; which one runs is chosen at run time.
#pragma once

#include <hwy/targets.h>

#include <functional>

namespace zero {

/// Runs `body` once for every instruction set that both this machine and the kernels have.
inline void on_each_instruction_set(const std::function<void(const char*)>& body) {
  const auto all = hwy::SupportedTargets();
  for (auto rest = all; rest != 0; rest &= rest - 1) {
    const auto target = rest & -rest;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace zero
