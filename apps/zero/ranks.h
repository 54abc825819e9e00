// The ranks of subcommands that work on several.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/zero/subcommands.h"
#include "zero/comm/group.h"
#include "zero/comm/job.h"

namespace zero::app {

/// The ranks that a subcommand works on.
class Ranks {
 public:
  Ranks(comm::Job job, int size) : job_(std::move(job)), size_(size) {}
  int size() const { return size_; }
  /// Returns whether this process is one of them already: a launcher has started it.
  bool launched() const { return job_.size > 1; }
  /// Returns this process's rank, if it is one of them already; else 0.
  int rank() const { return job_.rank; }
  /// Returns whether a launcher has started them on several hosts.
  bool across_hosts() const { return job_.across_hosts(); }
  /// Returns whether this is the first of the ranks' processes, or of all that there are so far.
  bool first() const { return job_.rank == 0; }

 private:
  comm::Job job_;
  int size_;
};

/// Returns the ranks that a launcher has started; if that is one, `nproc` where it is given.
/// Without a launcher returns `nproc`, or `otherwise` where that is not given. Throws ConfigError
/// where --nproc cannot be used.
Ranks choose_ranks(std::optional<int> nproc, int otherwise);

/// Starts the ranks, each of them this program with the subcommand's `words` and `arguments`;
/// returns the exit status of all.
int start_ranks(const Ranks& ranks, const std::vector<std::string>& words,
                const Arguments& arguments);

/// Runs `body` on every rank and returns the exit status. Where no launcher has started the ranks,
/// `start_ranks` does. A rank that fails says
/// so by itself; the others end without a word.
int run_on_ranks(const Ranks& ranks, const std::vector<std::string>& words,
                 const Arguments& arguments,
                 const std::function<int(const std::shared_ptr<comm::Group>&)>& body);

}  // namespace zero::app
