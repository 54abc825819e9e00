// Helpers that tests of schedules share: schedules to run under, waits to leave out, ranks as
// threads.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/device/device.h"

namespace zero::simulated {

/// Threads, threads with random delays, and the seeded executor, `seeds` times each, or as often as
/// ZERO_SEEDS in the environment says, if that is more. Under sanitizers, which take many times as
/// long: threads with random delays, once.
std::vector<Options> schedules(int seeds);
/// "seeded, seed 3".
std::string describe(const Options& options);

/// The reports, a line each; empty if there are none. Takes them.
std::string reports();

/// The outcome of runs without one wait.
struct LeftOut {
  int64_t waits = 0;  ///< how many there are, each left out in turn
  /// Of these: wrong in some run, and each wrong run reported; right in all and reported in some;
  /// and so on. `wrong_silent`, those of which some run was wrong without a report, must be none.
  int64_t wrong_reported = 0, right_reported = 0, right_silent = 0, wrong_silent = 0;
  std::vector<std::string> missed;  ///< the waits of `wrong_silent`
  /// Waits that nobody missed: implied by others, or needless. In order.
  std::vector<std::string> implied;
};
/// Runs `right`, which says whether its results are, with each wait of streams left out in turn
/// under the seeded executor, `seeds` times each. An exception counts as wrong. Each host must
/// enqueue the same waits in every run. `right` must free all that it allocated and end with
/// `synchronize`. Throws c10::Error where `right` is wrong as it stands.
LeftOut leave_out_each_wait(const std::function<bool()>& right, int seeds);
/// The same of the waits of hosts.
LeftOut leave_out_each_host_wait(const std::function<bool()>& right, int seeds);

/// Finds which places of a program that ask a stream to wait are of use. One schedule seldom shows
/// it: where others imply a wait, it may be the only one with more units or micro-batches. So
/// several schedules are looked at, and a place is needed when one of its waits is, in one of them.
class WaitPlaces {
 public:
  struct Place {
    int64_t waits = 0;  ///< that it asked for, of all hosts in all schedules looked at
    int64_t left_out = 0;
    std::string needed_in;  ///< the first such schedule; empty if none
  };
  /// Runs `right` as leave_out_each_wait does, without the waits, one by one, of the places that
  /// are not known to be needed. `schedule` is for `needed_in`.
  void look_at(const std::string& schedule, const std::function<bool()>& right);
  const std::map<std::string, Place>& all() const { return places_; }

 private:
  std::map<std::string, Place> places_;
};

/// Runs `body(rank)` on a thread for each rank, with the device of the same index. What a rank
/// throws is thrown when all have ended, of the lowest rank.
void run_ranks(int ranks, const std::function<void(int rank)>& body);

}  // namespace zero::simulated
