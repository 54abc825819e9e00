// Hosts and ranks that tests of several hosts run on.
#pragma once

#include <ostream>

namespace zero::comm {

struct World {
  int hosts;
  int local_size;
};

inline std::ostream& operator<<(std::ostream& out, const World& world) {
  return out << world.hosts << "x" << world.local_size;
}

}  // namespace zero::comm
