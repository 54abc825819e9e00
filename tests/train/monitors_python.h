// A Python in which packages are that read what monitors write.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace zero::train {

/// Returns the Python of ZERO_TEST_MONITORS, or of scripts/monitors_environment.sh; empty where
/// there is none.
inline std::string monitors_python() {
  if (const char* given = std::getenv("ZERO_TEST_MONITORS")) return given;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::string caches = cache != nullptr  ? cache
                             : home != nullptr ? std::string(home) + "/.cache"
                                               : "";
  const auto path = caches + "/libzero/monitors/bin/python";
  return std::filesystem::exists(path) ? path : "";
}

}  // namespace zero::train
