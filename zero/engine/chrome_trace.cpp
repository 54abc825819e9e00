#include "zero/engine/chrome_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <string_view>

namespace zero {

namespace {

constexpr std::array<std::string_view, 7> kRows{
    "compute", "gathers", "reductions", "updates", "disk reads", "disk writes", "control"};

size_t row_of(Activity activity) {
  switch (activity) {
    case Activity::gather:
      return 1;
    case Activity::reduce:
      return 2;
    case Activity::update:
      return 3;
    case Activity::disk_read:
      return 4;
    case Activity::disk_write:
      return 5;
    case Activity::control:
      return 6;
    default:
      return 0;
  }
}

// Returns a name as a JSON text. Quotes and backslashes are escaped; a byte that is not printable
// ASCII becomes a question mark.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') result += '\\';
    result += byte < 0x20 || byte > 0x7e ? '?' : c;
  }
  return result + '"';
}

class Writer {
 public:
  explicit Writer(int64_t origin) : origin_(origin) {}

  void add(const RankSpans& rank) {
    process_ = rank.rank + 1;  // there is no process 0
    clock_ = rank.clock;
    threads_ = 0;
    describe("process_name", 0, fmt::format("\"name\":\"rank {}\"", rank.rank));
    describe("process_sort_index", 0, fmt::format("\"sort_index\":{}", rank.rank));
    for (size_t row = 0; row < kRows.size(); ++row) {
      std::vector<const Span*> spans;
      for (const auto& span : rank.spans) {
        if (row_of(span.activity) == row) spans.push_back(&span);
      }
      // A span that encloses another comes before it.
      std::stable_sort(spans.begin(), spans.end(), [](const Span* a, const Span* b) {
        return a->begin != b->begin ? a->begin < b->begin : a->end > b->end;
      });
      add_row(row, spans);
    }
  }

  std::string end(int64_t dropped, const std::optional<comm::LinkSpeed>& link) {
    const auto of_link =
        !link ? std::string()
              : fmt::format(",\"link_bytes_per_s\":{:.0f},\"link_latency_ms\":{:.3f}",
                            link->bandwidth, link->latency * 1e3);
    return fmt::format(
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"writer\":\"libzero\",\"dropped_spans\":{}{}"
        "}}"
        ",\"traceEvents\":[\n{}\n]}}\n",
        dropped, of_link, text_);
  }

 private:
  void add_row(size_t row, const std::vector<const Span*>& spans) {
    if (row == 0) {  // the spans of one thread, which nest
      const int64_t thread = begin_line(row, 0);
      for (const auto* span : spans) add(*span, thread);
      return;
    }
    struct Line {
      int64_t thread = 0;
      int64_t end = std::numeric_limits<int64_t>::min();
    };
    std::vector<Line> lines;
    for (const auto* span : spans) {
      auto line = std::find_if(lines.begin(), lines.end(),
                               [&](const Line& each) { return each.end <= span->begin; });
      if (line == lines.end()) {
        lines.push_back({begin_line(row, lines.size())});
        line = std::prev(lines.end());
      }
      line->end = span->end;
      add(*span, line->thread);
    }
  }

  int64_t begin_line(size_t row, size_t number) {
    const int64_t thread = process_ * 10000 + threads_++;
    const auto name =
        number == 0 ? std::string(kRows[row]) : fmt::format("{} ({})", kRows[row], number + 1);
    describe("thread_name", thread, fmt::format("\"name\":\"{}\"", name));
    describe("thread_sort_index", thread, fmt::format("\"sort_index\":{}", row * 1000 + number));
    return thread;
  }

  void describe(std::string_view what, int64_t thread, std::string_view value) {
    separate();
    fmt::format_to(std::back_inserter(text_),
                   "{{\"ph\":\"M\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"args\":{{{}}}}}", what,
                   process_, thread, value);
  }

  void add(const Span& span, int64_t thread) {
    separate();
    const auto label = span.label();
    const bool by_label = span.activity == Activity::operation || row_of(span.activity) > 0;
    const auto shown = by_label && !label.empty() ? label : name(span.activity);
    std::string arguments;
    if (!by_label && !label.empty()) arguments = fmt::format("\"of\":{}", quoted(label));
    if (span.bytes > 0) {
      arguments += fmt::format("{}\"bytes\":{}", arguments.empty() ? "" : ",", span.bytes);
    }
    fmt::format_to(std::back_inserter(text_),
                   "{{\"ph\":\"X\",\"name\":{},\"cat\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{},"
                   "\"dur\":{},\"args\":{{{}}}}}",
                   quoted(shown), name(span.activity), process_, thread,
                   microseconds(span.begin - clock_ - origin_), microseconds(span.end - span.begin),
                   arguments);
  }

  static std::string microseconds(int64_t nanoseconds) {
    return fmt::format("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000);
  }

  void separate() {
    if (!text_.empty()) text_ += ",\n";
  }

  int64_t origin_;
  int64_t process_ = 0;
  int64_t clock_ = 0;
  int64_t threads_ = 0;
  std::string text_;
};

}  // namespace

std::string chrome_trace(const std::vector<RankSpans>& ranks, int64_t dropped,
                         const std::optional<comm::LinkSpeed>& link) {
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (const auto& rank : ranks) {
    for (const auto& span : rank.spans) origin = std::min(origin, span.begin - rank.clock);
  }
  Writer writer(origin);
  for (const auto& rank : ranks) writer.add(rank);
  return writer.end(dropped, link);
}

}  // namespace zero
