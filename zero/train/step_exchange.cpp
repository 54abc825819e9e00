#include "zero/train/step_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace zero::train {
namespace {

/// The numbers of a rank besides losses: signal, failure, save, and two times.
constexpr int64_t kOthers = 5;

}  // namespace

StepExchange::StepExchange(comm::Group& group, int64_t micro_batches)
    : group_(group),
      mine_(at::empty({micro_batches + kOthers}, at::kFloat)),
      all_(at::empty({(micro_batches + kOthers) * group.size()}, at::kFloat)),
      all_losses_(static_cast<size_t>(micro_batches * group.size())),
      times_(static_cast<size_t>(group.size())),
      stragglers_(group.size(), group.topology().hosts > 1 ? group.topology().local_size : 0) {}

StepExchange::Result StepExchange::exchange(const std::vector<float>& losses, int stop_signal,
                                            bool report_failed, SaveProgress save, RankTime time) {
  const auto k = static_cast<int64_t>(losses.size());
  float* mine = mine_.data_ptr<float>();
  std::copy(losses.begin(), losses.end(), mine);
  mine[k] = static_cast<float>(stop_signal);
  mine[k + 1] = report_failed ? 1 : 0;
  mine[k + 2] = static_cast<float>(save);
  mine[k + 3] = time.busy_ms;
  mine[k + 4] = time.disk_ms;
  group_.all_gather_control(all_, mine_, "losses");

  const float* all = all_.data_ptr<float>();
  const auto of_rank = [&](int rank) { return all + rank * (k + kOthers); };
  Result result;
  bool written = true;  // by all ranks
  for (int rank = 0; rank < group_.size(); ++rank) {
    result.report_failed = result.report_failed || of_rank(rank)[k + 1] != 0;
    if (result.stop_signal == 0) result.stop_signal = static_cast<int>(of_rank(rank)[k]);
    const auto saved = static_cast<SaveProgress>(of_rank(rank)[k + 2]);
    written = written && saved == SaveProgress::written;
    result.save_over = result.save_over || saved == SaveProgress::failed;
    times_[static_cast<size_t>(rank)] = {of_rank(rank)[k + 3], of_rank(rank)[k + 4]};
  }
  result.save_over = result.save_over || written;
  if (times_.front().busy_ms > 0) result.slow = stragglers_.add(times_);
  // The order of additions is the same at every stage, so the mean is the same bit for bit.
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      sum += of_rank(rank)[i];
      all_losses_[static_cast<size_t>(i * group_.size() + rank)] = of_rank(rank)[i];
    }
  }
  result.mean_loss = static_cast<float>(sum / static_cast<double>(k * group_.size()));
  return result;
}

}  // namespace zero::train
