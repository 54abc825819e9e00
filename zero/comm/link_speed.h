// How fast the link between hosts is.
#pragma once

namespace zero::comm {

struct LinkSpeed {
  double bandwidth = 0;  ///< bytes a second that a host sends, while it receives as many
  double latency = 0;    ///< seconds of a small call from its begin to its end

  bool operator==(const LinkSpeed&) const = default;
};

}  // namespace zero::comm
