// How a rank's link to other hosts spends its time.
#pragma once

namespace zero::comm {

/// Milliseconds of one rank's link to the other hosts: Note [The link's time] in link_clock.h. They
/// add up to the time for which they count.
struct LinkTimes {
  double busy = 0;             ///< bytes were on their way
  double nothing_to_send = 0;  ///< no call was under way
  double processor = 0;        ///< calls were under way whose bytes were not ready on this host
  double peer_late = 0;        ///< this rank waited for a call that a peer had not begun

  double still() const { return nothing_to_send + processor + peer_late; }
  double total() const { return busy + still(); }
  LinkTimes& operator+=(const LinkTimes& other) {
    busy += other.busy;
    nothing_to_send += other.nothing_to_send;
    processor += other.processor;
    peer_late += other.peer_late;
    return *this;
  }
  LinkTimes operator-(const LinkTimes& other) const {
    return {busy - other.busy, nothing_to_send - other.nothing_to_send, processor - other.processor,
            peer_late - other.peer_late};
  }
  bool operator==(const LinkTimes&) const = default;
};

}  // namespace zero::comm
