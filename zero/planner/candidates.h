// The candidates that a question of the planner has: configurations of ZeRO with their memory and
// time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "zero/planner/operator_speed.h"
#include "zero/planner/planner.h"

namespace zero::plan {

/// A way to place states.
struct Way {
  int stage = 0;
  OffloadDevice optimizer = OffloadDevice::none;
  OffloadDevice parameters = OffloadDevice::none;
  bool eight_bit = false;
  enum class Across : uint8_t { all, kept, shard_groups, quantised } across = Across::all;
  Updates updates = Updates::in_step;
};

/// Returns the ways that a question's machines allow.
std::vector<Way> ways(const Question& question);

/// Returns whether a candidate is plain data parallelism.
bool plain(const Candidate& candidate);

/// Traces, each made once.
class Traces {
 public:
  explicit Traces(const Question& question)
      : question_(question), speed_(question.cluster.per_host, question.hosts) {}
  const Trace& of(const Config& config, int64_t micro_batch, int64_t recompute) {
    return made(config, micro_batch, recompute);
  }
  /// The same, with its operators measured if the cluster is this machine.
  const Trace& timed(const Config& config, int64_t micro_batch, int64_t recompute);

 private:
  Trace& made(const Config& config, int64_t micro_batch, int64_t recompute);

  const Question& question_;
  OperatorSpeed speed_;
  std::set<const Trace*> timed_;
  std::map<std::tuple<int64_t, int64_t, bool, bool>, std::unique_ptr<Trace>> all_;
};

/// All candidates of a question with their memory; times follow.
struct Table {
  Table(const Question& question, Traces& traces) : question(question), traces(traces) {}

  /// Finds the candidates and sorts them, the best first. The first `split` have their times in
  /// parts.
  void answer(size_t split);
  Candidate make(const Way& way, int64_t micro, int64_t accumulation, int64_t recompute);
  /// Makes that of a whole configuration.
  Candidate make(const Config& config, int64_t micro, int64_t recompute);
  /// Computes the times of a candidate that fits, in parts.
  void time_in_parts(Candidate& candidate);

  const Question& question;
  Traces& traces;
  std::vector<Candidate> all;

 private:
  void fill();
  void measure_all();
  void time(Candidate& candidate);
  void sort();
  void split_times(size_t most);
  void find_parts(Candidate& candidate);
};

}  // namespace zero::plan
