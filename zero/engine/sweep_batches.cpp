#include "zero/engine/sweep_batches.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace zero {

using optim::Reach;

namespace {

constexpr auto kNormsBytes = static_cast<int64_t>(sizeof(optim::ParameterNorms));
static_assert(std::is_trivially_copyable_v<optim::ParameterNorms> &&
              sizeof(optim::ParameterNorms) == 2 * optim::ExactSum::kWords * sizeof(int64_t));

// Messages of bytes have the size of whole words.
constexpr int64_t kWord = 8;

class Batcher {
 public:
  Batcher(const partition::Layout& layout, const std::vector<UnitPlan>& units,
          const ModelShape& model, int64_t ranks, bool sliced)
      : layout_(layout), units_(units), model_(model), ranks_(ranks), sliced_(sliced) {}

  std::vector<SweepBatch> batches() {
    make_batches();
    for (auto& batch : batches_) {
      if (batch.reach == Reach::matrix) deal(batch);
      if (sliced_) plan_exchange(batch);
    }
    return std::move(batches_);
  }

 private:
  void make_batches() {
    // The directions of one batch are held at a time.
    constexpr int64_t kFactoredNumel = 1 << 22;
    SweepBatch by_parameter{.reach = Reach::parameter};
    SweepBatch by_matrix{.reach = Reach::matrix};
    SweepBatch by_factors{.reach = Reach::factors};
    int64_t matrices = 0;
    int64_t numel = 0;
    const auto close = [&](SweepBatch& batch) {
      if (!batch.units.empty()) batches_.push_back(std::exchange(batch, {.reach = batch.reach}));
    };
    for (int64_t u = 0; u < layout_.unit_count(); ++u) {
      const auto& plan = units_[static_cast<size_t>(u)];
      if (plan.reach == Reach::parameter) {
        by_parameter.units.push_back(u);
      } else if (plan.reach == Reach::matrix) {
        by_matrix.units.push_back(u);
        matrices += static_cast<int64_t>(layout_.unit(u).segments.size());
        if (matrices < ranks_) continue;
        close(by_matrix);
        matrices = 0;
      } else if (plan.reach == Reach::factors) {
        by_factors.units.push_back(u);
        numel += plan.owned.size();
        if (numel < kFactoredNumel) continue;
        close(by_factors);
        numel = 0;
      }
    }
    close(by_matrix);
    close(by_factors);
    close(by_parameter);
  }

  // Deals out the most expensive matrix first, each to the rank that has least to do.
  void deal(SweepBatch& batch) const {
    for (const int64_t u : batch.units) {
      for (const auto& segment : layout_.unit(u).segments) {
        const auto& shape = model_.parameter(segment.parameter);
        SweepBatch::Matrix matrix{.parameter = segment.parameter,
                                  .rows = shape.sizes[0],
                                  .columns = shape.sizes[1],
                                  .projection = projection_of(shape)};
        if (!shape.is_contiguous()) std::swap(matrix.rows, matrix.columns);
        batch.matrices.push_back(matrix);
      }
    }
    const auto cost = [](const SweepBatch::Matrix& m) {
      return static_cast<double>(m.rows) * static_cast<double>(m.columns) *
             static_cast<double>(m.projection ? m.projection->rank : std::min(m.rows, m.columns));
    };
    std::stable_sort(batch.matrices.begin(), batch.matrices.end(),
                     [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
    std::vector<double> work(static_cast<size_t>(ranks_), 0.0);
    std::vector<int64_t> sent(work.size(), 0);
    for (auto& matrix : batch.matrices) {
      const auto least =
          static_cast<size_t>(std::min_element(work.begin(), work.end()) - work.begin());
      matrix.owner = static_cast<int>(least);
      matrix.offset = sent[least];
      work[least] += cost(matrix);
      sent[least] += matrix.found();
      batch.sent_by_owner = std::max(batch.sent_by_owner, sent[least]);
    }
  }

  // The ranks gather the arrays in this order after the first sweeps.
  void plan_exchange(SweepBatch& batch) const {
    auto& gathered = batch.gathered_bytes;
    if (batch.reach == Reach::matrix) {
      for (const int64_t u : batch.units) gathered.push_back(layout_.unit(u).numel * 4);
      gathered.push_back(ranks_ * batch.sent_by_owner * 4);
      return;
    }
    if (batch.reach == Reach::factors) {
      batch.factor_message = factor_message(batch);
      if (const int64_t count = ranks_ * batch.factor_message; count > 0) {
        gathered.push_back(count);  // exponents
        gathered.push_back(count * static_cast<int64_t>(sizeof(double)));
      }
    }
    find_shared(batch);
    if (!batch.shared.empty())
      gathered.push_back(ranks_ * static_cast<int64_t>(batch.shared.size()) * kNormsBytes);
  }

  // Returns the most rows and columns that the slice of any rank meets.
  int64_t factor_message(const SweepBatch& batch) const {
    std::vector<int64_t> counts(static_cast<size_t>(ranks_), 0);
    for (const int64_t u : batch.units) {
      for (const auto& segment : layout_.unit(u).segments) {
        const auto factors = factors_of(model_.parameter(segment.parameter));
        if (!factors) continue;
        for (int64_t rank = 0; rank < ranks_; ++rank) {
          const auto mine =
              partition::intersect(segment.range(), layout_.slice(u, static_cast<int>(rank)));
          if (mine.empty()) continue;
          counts[static_cast<size_t>(rank)] +=
              factors->part({mine.begin - segment.offset, mine.end - segment.offset}).size();
        }
      }
    }
    return at::round_up(*std::ranges::max_element(counts), kWord);
  }

  void find_shared(SweepBatch& batch) const {
    for (const int64_t u : batch.units) {
      const int64_t slice = layout_.slice_numel(u);
      for (const auto& segment : layout_.unit(u).segments) {
        const bool whole = segment.numel == 0 ||
                           segment.offset / slice == (segment.offset + segment.numel - 1) / slice;
        if (!whole) batch.shared.push_back(segment.parameter);
      }
    }
  }

  const partition::Layout& layout_;
  const std::vector<UnitPlan>& units_;
  const ModelShape& model_;
  int64_t ranks_;
  bool sliced_;
  std::vector<SweepBatch> batches_;
};

}  // namespace

std::vector<SweepBatch> batch_sweeps(const partition::Layout& layout,
                                     const std::vector<UnitPlan>& units, const ModelShape& model,
                                     int64_t ranks, bool sliced) {
  return Batcher(layout, units, model, ranks, sliced).batches();
}

std::vector<int> factored_owners(const std::vector<SweepBatch>& batches, size_t parameters,
                                 bool sliced) {
  std::vector<int> owners(parameters, -1);
  for (const auto& batch : batches) {
    for (const auto& matrix : batch.matrices) {
      if (sliced && matrix.projection) owners[static_cast<size_t>(matrix.parameter)] = matrix.owner;
    }
  }
  return owners;
}

}  // namespace zero
