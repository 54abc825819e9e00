#include "zero/comm/shm_control.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <array>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "zero/base/error.h"

namespace zero::comm {

std::string_view name(Op op) {
  static constexpr std::array<std::string_view, 8> kNames{
      "nothing",   "all_gather", "reduce_scatter", "all_reduce",
      "broadcast", "all_to_all", "barrier",        "window"};
  const auto index = static_cast<size_t>(op);
  return index < kNames.size() ? kNames[index] : "an unknown collective";
}

namespace {
constexpr int64_t kBlockStep = 64;  // blocks have 1 to 4 such steps
constexpr uint8_t kPacked = 255;
}  // namespace

uint8_t wire_code(const std::optional<LinkWire>& wire) {
  if (!wire) return 0;
  if (wire->packed) return kPacked;
  const auto& [format, block] = wire->quantisation;
  return static_cast<uint8_t>(static_cast<int64_t>(format) * 4 + block / kBlockStep);
}

bool CallRecord::matches(const CallRecord& other) const {
  return sequence == other.sequence && op == other.op && input_bytes == other.input_bytes &&
         output_bytes == other.output_bytes && slice_distance == other.slice_distance &&
         within == other.within && digest == other.digest && input_dtype == other.input_dtype &&
         output_dtype == other.output_dtype && root == other.root && wire == other.wire &&
         label == other.label;
}

std::string CallRecord::describe() const {
  if (op == Op::none) return "no collective yet";
  auto text = fmt::format("{} #{}", name(op), sequence);
  if (!label.view().empty()) text += fmt::format(" '{}'", label.view());
  if (within != Op::none && within != op) text += fmt::format(" of {}", name(within));
  if (op == Op::barrier || op == Op::window) return text;
  const auto dtype = [](int8_t type) { return c10::toString(static_cast<c10::ScalarType>(type)); };
  if (op == Op::all_reduce || op == Op::broadcast) {
    text += fmt::format(" ({} bytes, {}", input_bytes, dtype(input_dtype));
    if (op == Op::broadcast) text += fmt::format(", root {}", root);
    return text + ")";
  }
  text += fmt::format(" ({} -> {} bytes, {}", input_bytes, output_bytes, dtype(input_dtype));
  if (input_dtype != output_dtype) text += fmt::format(" -> {}", dtype(output_dtype));
  if (wire == kPacked) text += ", between hosts with packed exponents";
  if (wire != 0 && wire != kPacked) {
    static constexpr std::array<std::string_view, 4> kFormats{"int8", "int4", "fp8", "?"};
    text += fmt::format(", between hosts {} by {}", kFormats[(wire - 1) / 4 % 4],
                        ((wire - 1) % 4 + 1) * kBlockStep);
  }
  return text + ")";
}

void refuse_mismatch(std::span<const CallRecord> records, const std::function<int(int)>& number,
                     int reporter) {
  std::map<std::string, std::string> callers;
  for (size_t i = 0; i < records.size(); ++i) {
    auto& ranks = callers[records[i].describe()];
    ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", number(static_cast<int>(i)));
  }
  std::string table;
  for (const auto& [what, ranks] : callers) table += fmt::format("\n  {}: by rank {}", what, ranks);
  throw CommError(
      fmt::format("The ranks do not call the same collective (rank {} reports). Every rank must "
                  "issue the same collectives, of the same sizes, dtypes and labels, in the same "
                  "order, but these were called:{}",
                  reporter, table));
}

}  // namespace zero::comm
