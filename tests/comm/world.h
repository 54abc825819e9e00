// The hosts and ranks that tests of several hosts run on.
#pragma once

#include <ostream>
#include <string>

namespace zero::comm {

struct World {
  int hosts;
  int local_size;
};

inline std::ostream& operator<<(std::ostream& out, const World& world) {
  return out << world.hosts << "x" << world.local_size;
}

/// Prints a world for names of tests.
inline std::string name_of(const World& world) {
  return std::to_string(world.hosts) + "x" + std::to_string(world.local_size);
}

}  // namespace zero::comm
