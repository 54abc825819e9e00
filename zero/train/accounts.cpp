#include "zero/train/accounts.h"

#include "zero/base/host_allocator.h"
#include "zero/comm/gather_records.h"
#include "zero/device/memory.h"

namespace zero::train {

std::vector<RankMemory> collect_memory(Engine& engine) {
  const auto& ledger = *engine.group().ledger();
  const auto formula = engine.memory_formula();
  RankMemory mine;
  for (size_t i = 0; i < kCategories; ++i) mine.usage[i] = ledger.usage(static_cast<Category>(i));
  // States, units and buckets are not LibTorch's; activations are the rest that its allocator
  // holds.
  const auto host = HostAllocator::instance().usage();
  mine.usage[static_cast<size_t>(Category::activations)] =
      other_tensors(engine.group().device(), ledger);
  mine.reserved = host.reserved;
  if (const auto device = engine.group().device(); is_asynchronous(device)) {
    const auto reserved = device_memory(device).reserved;
    mine.reserved = {reserved, reserved};
  }
  mine.system_requests = host.system_requests;
  mine.total = ledger.total();
  mine.padding = formula.padding;
  mine.device = ledger.device();
  const auto on_host = engine.host_memory_formula();
  for (const auto& [category, bytes] : {std::pair(Category::parameters, formula.parameters),
                                        {Category::gradients, formula.gradients},
                                        {Category::optimizer, formula.optimizer},
                                        {Category::host_parameters, on_host.parameters},
                                        {Category::host_gradients, on_host.gradients},
                                        {Category::host_optimizer, on_host.optimizer}})
    mine.formula[static_cast<size_t>(category)] = bytes;
  mine.disk = engine.disk();
  return comm::gather_records(engine.group(), mine, "memory by rank");
}

double busy_speed(const RankTraffic& traffic) {
  if (!traffic.link || traffic.link->busy <= 0) return 0;
  int64_t bytes = 0;
  for (const auto& count : traffic.counts) bytes += count.link_bytes;
  return static_cast<double>(bytes) / traffic.link->busy * 1e3;
}

StepTraffic::Counts StepTraffic::now() const {
  Counts counts;
  for (size_t i = 0; i < comm::kCollectives; ++i) {
    counts[i] = engine_.group().traffic().count(static_cast<comm::Collective>(i));
  }
  return counts;
}

void StepTraffic::begin_step() {
  before_ = now();
  disk_before_ = engine_.disk();
  host_before_ = engine_.host_traffic();
  link_before_ = engine_.group().link_times();
}

void StepTraffic::end_step(bool updated) {
  add();
  const auto formula = engine_.traffic_formula(updated);
  for (const auto bytes :
       {&TrafficFormula::all_gather, &TrafficFormula::reduce_scatter, &TrafficFormula::all_reduce,
        &TrafficFormula::all_gather_link, &TrafficFormula::reduce_scatter_link,
        &TrafficFormula::all_reduce_link, &TrafficFormula::disk_read, &TrafficFormula::disk_written,
        &TrafficFormula::host_down, &TrafficFormula::host_up})
    formula_sum_.*bytes += formula.*bytes;
  ++steps_;
}

void StepTraffic::add() {
  const auto disk = engine_.disk();
  disk_sum_.bytes = disk.bytes;
  disk_sum_.read += disk.read - disk_before_.read;
  disk_sum_.written += disk.written - disk_before_.written;
  disk_sum_.wait_ms += disk.wait_ms - disk_before_.wait_ms;
  const auto host = engine_.host_traffic();
  host_sum_.down += host.down - host_before_.down;
  host_sum_.up += host.up - host_before_.up;
  if (link_before_) {
    if (!link_sum_) link_sum_.emplace();
    *link_sum_ += *engine_.group().link_times() - *link_before_;
  }
  const auto after = now();
  for (size_t i = 0; i < comm::kCollectives; ++i) {
    sum_[i] += after[i];
    sum_[i] -= before_[i];
  }
}

void StepTraffic::complete_update() {
  begin_step();
  engine_.complete_update();
  add();
}

std::vector<RankTraffic> StepTraffic::collect() const {
  const auto& formula = formula_sum_;
  RankTraffic mine;
  mine.counts = sum_;
  mine.hosts = engine_.group().topology().hosts;
  const auto set = [&](comm::Collective collective, auto bytes, auto link_bytes) {
    mine.formula[static_cast<size_t>(collective)] = formula.*bytes;
    mine.link_formula[static_cast<size_t>(collective)] = formula.*link_bytes;
  };
  using Formula = TrafficFormula;
  set(comm::Collective::all_gather, &Formula::all_gather, &Formula::all_gather_link);
  set(comm::Collective::reduce_scatter, &Formula::reduce_scatter, &Formula::reduce_scatter_link);
  set(comm::Collective::all_reduce, &Formula::all_reduce, &Formula::all_reduce_link);
  mine.disk = disk_sum_;
  mine.disk_read_formula = formula.disk_read;
  mine.disk_written_formula = formula.disk_written;
  mine.host = host_sum_;
  mine.host_formula = {formula.host_down, formula.host_up};
  mine.link = link_sum_;
  return comm::gather_records(engine_.group(), mine, "traffic by rank");
}

}  // namespace zero::train
