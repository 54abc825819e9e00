#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/data/utf8.h"
#include "zero/train/metrics.h"
#include "zero/train/monitor.h"

namespace zero::train {
namespace {

using Clock = std::chrono::steady_clock;

/// Writes 1234567 as "1,234,567".
std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (auto i = static_cast<int64_t>(digits.size()) - 3; i > (number < 0 ? 1 : 0); i -= 3) {
    digits.insert(static_cast<size_t>(i), ",");
  }
  return digits;
}

/// Writes 75 as "1:15", and 3700 as "1:01:40".
std::string clock_time(double seconds) {
  const auto total = static_cast<int64_t>(std::lround(seconds));
  const int64_t h = total / 3600, m = total / 60 % 60, s = total % 60;
  return h > 0 ? fmt::format("{}:{:02}:{:02}", h, m, s) : fmt::format("{}:{:02}", m, s);
}

std::string bytes_or_dash(int64_t bytes) {
  return bytes == 0 ? "-" : format_bytes(static_cast<double>(bytes));
}

/// Prints without exceptions: fmt::print throws if nobody reads any more, and a run outlives its
/// terminal.
template <class... Values>
void print(fmt::format_string<Values...> format, Values&&... values) {
  const auto text = fmt::format(format, std::forward<Values>(values)...);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

class ConsoleMonitor final : public Monitor {
 public:
  explicit ConsoleMonitor(int64_t log_every)
      : log_every_(log_every), terminal_(isatty(STDOUT_FILENO) == 1) {}
  ConsoleMonitor(const ConsoleMonitor&) = delete;
  ConsoleMonitor& operator=(const ConsoleMonitor&) = delete;
  /// Removes the progress bar, so that the next output begins a line.
  ~ConsoleMonitor() override {
    if (!drawn_) return;
    clear_bar();
    std::fflush(stdout);
  }

  void begin(const RunInfo& info) override {
    info_ = info;
    begin_ = Clock::now();
    print("model     {}: {} parameters ({}, vocabulary {}), {}, {}\n", info.model_name,
          grouped(info.parameters), info.model_description, grouped(info.vocabulary), info.dtype,
          info.first_step > 1    ? "weights of the checkpoint"
          : info.weights.empty() ? "random initial weights"
                                 : info.weights);
    print("data      {}: {} tokens to train on, {} for validation\n", info.data,
          grouped(info.train_tokens), grouped(info.validation_tokens));
    print("ranks     {} x {} thread{}, ZeRO stage {}\n", info.ranks, info.threads,
          info.threads == 1 ? "" : "s", info.stage);
    print(
        "step      {} tokens (ranks {} x micro-batches {} x sequences {} x {}); {} steps: {} "
        "tokens, {:.2f} epochs\n",
        grouped(info.tokens_per_step()), info.ranks, info.accumulate, info.micro_batch,
        info.sequence, grouped(info.steps), grouped(info.steps * info.tokens_per_step()),
        static_cast<double>(info.steps * info.tokens_per_step()) /
            static_cast<double>(std::max<int64_t>(1, info.train_tokens)));
    print("optimizer {}\n", info.optimizer);
    if (!info.tiers.empty()) print("memory    {}\n", info.tiers);
    if (info.link) {
      print("link      {:.1f} MB/s between hosts, {:.2f} ms for a small call (measured)\n",
            info.link->bandwidth * 1e-6, info.link->latency * 1e3);
    }
    for (const auto& fault : info.damaged) print("damaged   {}\n", fault);
    if (info.first_step > 1) {
      print("resumed   at step {}{}\n", info.first_step,
            info.from_memory ? " from the copy in the hosts' memory" : "");
    }
    for (const auto& change : info.changes) print("changed   {}\n", change);
    std::fflush(stdout);
  }

  void initial_memory(const std::vector<RankMemory>& ranks) override {
    print("\nmemory before step {} (formula beside)\n", info_.first_step);
    table(ranks, false);
    on_disk_ = ranks[0].disk.bytes > 0;
    print("\n{:>7}  {:>9}  {:>9}  {:>9}  {:>8}  {:>9}  {:>6}{}  {:>10}\n", "step", "loss", "norm",
          "lr", "ms", "tok/s", "comm%", on_disk_ ? "   disk%" : "", "mem");
    std::fflush(stdout);
  }

  void step(const StepReport& report) override {
    clear_bar();
    const bool shown = report.step % log_every_ == 0 || report.step == info_.first_step ||
                       report.step == info_.steps || report.skipped || !report.notices.empty();
    if (shown) {
      print("{:>7}  {:>9.5f}  {:>9.4f}  {:>9.2e}  {:>8.1f}  {:>9}  {:>6.1f}{}  {:>10}{}\n",
            report.step, report.loss, std::abs(report.grad_norm), report.lr, report.step_ms,
            grouped(std::lround(report.tokens_per_s)), 100 * report.comm_ms / report.step_ms,
            on_disk_ ? fmt::format("  {:>6.1f}", 100 * report.disk_ms / report.step_ms) : "",
            format_bytes(static_cast<double>(report.memory_peak)),
            report.skipped ? skipped(report) : "");
    }
    if (report.flops) print_flops(*report.flops);
    if (!report.anomaly.empty()) print("         {}\n", report.anomaly);
    if (report.breakdown && shown) print_breakdown(*report.breakdown);
    for (const auto& notice : report.notices) print("         {}\n", notice);
    draw_bar(report.step);
    std::fflush(stdout);
  }

  void validation(const ValidationReport& report) override {
    clear_bar();
    print("{:>7}  {:>9.5f}  validation, {} tokens{}\n", report.step, report.loss,
          grouped(report.tokens), report.accuracy ? ", " + to_text(*report.accuracy) : "");
    std::fflush(stdout);
  }

  void saved(const SaveReport& report) override {
    if (report.in_memory && report.failure.empty()) return;  // there are many
    clear_bar();
    if (!report.failure.empty()) {
      print("         {}\n", report.failure);
    } else {
      print("         {}: {} in {:.1f} s, of which training waited {:.0f} ms\n", report.path,
            format_bytes(static_cast<double>(report.bytes)), report.seconds, report.held_ms);
    }
    std::fflush(stdout);
  }

  void profile(const ProfileReport& report) override {
    clear_bar();
    print("         profile of step {} in {}: {} spans{}; open it at ui.perfetto.dev\n",
          report.step, report.file, grouped(report.spans),
          report.dropped > 0 ? fmt::format(" ({} more did not fit)", grouped(report.dropped)) : "");
    std::fflush(stdout);
  }

  void memory(const std::vector<RankMemory>& ranks) override {
    clear_bar();
    print("\nmemory at its peak (formula beside)\n");
    table(ranks, true);
  }

  void traffic(const std::vector<RankTraffic>& ranks, int64_t steps) override {
    if (steps == 0) return;
    if (ranks[0].disk.bytes > 0) disk_traffic(ranks, steps);
    if (ranks[0].host.down > 0 || ranks[0].host.up > 0) host_traffic(ranks, steps);
    if (ranks.size() < 2) return;
    print("\ntraffic a step, bytes sent (formula beside)\n{:>6}", "rank");
    for (const auto collective : kTrafficColumns) print("  {:>25}", comm::name(collective));
    print("\n");
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      print("{:>6}", rank);
      for (const auto collective : kTrafficColumns) {
        const auto i = static_cast<size_t>(collective);
        print("  {}", bytes_cell(ranks[rank].counts[i].logical_bytes,
                                 ranks[rank].formula[i].value_or(0), steps));
      }
      print("\n");
    }
    if (ranks[0].hosts > 1) link_traffic(ranks, steps);
    if (ranks[0].link) link_times(ranks, steps);
  }

  void call(const comm::CallTime& call) override {
    clear_bar();
    const double ms = static_cast<double>(call.nanoseconds) / 1e6;
    print("         {}{}{}: {}, {:.3f} ms\n", comm::name(call.collective),
          call.in_place ? " in place" : "",
          call.label.empty() ? "" : fmt::format(" ({})", call.label), bytes_or_dash(call.message),
          ms);
    std::fflush(stdout);
  }

  void calls(const std::vector<comm::CallTimes>& calls) override {
    print("\ncollectives of rank 0, by size of the whole message\n");
    print("{:<24}  {:>5}  {:>12}  {:>9}  {:>12}  {:>12}  {:>12}  {:>14}  {:>9}\n", "", "ranks",
          "message", "calls", "bytes", "total ms", "average ms", "algorithm GB/s", "bus GB/s");
    for (const auto& each : calls) {
      const auto bandwidth = [&](double value) {
        return each.in_place || each.collective == comm::Collective::control
                   ? std::string("-")
                   : fmt::format("{:.2f}", value);
      };
      print("{:<24}  {:>5}  {:>12}  {:>9}  {:>12}  {:>12.2f}  {:>12.3f}  {:>14}  {:>9}\n",
            fmt::format("{}{}", comm::name(each.collective), each.in_place ? " in place" : ""),
            each.ranks, bytes_or_dash(each.message), grouped(each.calls),
            bytes_or_dash(each.calls * each.message), each.total_ms(), each.average_ms(),
            bandwidth(each.algorithm_bandwidth()), bandwidth(each.bus_bandwidth()));
    }
    std::fflush(stdout);
  }

  void sample(const std::string& prompt, const std::string& text) override {
    print("\nsample\n{}{}\n", printable(prompt, "\n\t"), printable(text, "\n\t"));
  }

  void end(const EndReport& report) override {
    print("\n{} after step {} in {}; weights in {}\n", report.reason, report.steps,
          clock_time(report.seconds), report.model_file);
    std::fflush(stdout);
  }

 private:
  /// Returns a step's bytes with the formula's beside them.
  static std::string bytes_cell(int64_t bytes, int64_t formula, int64_t steps) {
    return fmt::format("{:>12} {:>12}", bytes_or_dash(bytes / steps),
                       "(" + bytes_or_dash(formula / steps) + ")");
  }

  /// Prints the bytes of all collectives except control, as they really moved.
  static void link_traffic(const std::vector<RankTraffic>& ranks, int64_t steps) {
    print("\ntraffic a step by link, bytes (formula beside)\n{:>6}  {:>12}  {:>25}\n", "rank",
          "inside hosts", "between hosts");
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto& of = ranks[rank];
      comm::TrafficCount sum;
      int64_t formula = 0;
      for (size_t i = 0; i < comm::kCollectives; ++i) {
        if (static_cast<comm::Collective>(i) != comm::Collective::control) sum += of.counts[i];
        formula += of.link_formula[i].value_or(0);
      }
      print("{:>6}  {:>12}  {}\n", rank, bytes_or_dash(sum.copied_bytes / steps),
            bytes_cell(sum.link_bytes, formula, steps));
    }
  }

  /// Prints for how long each rank's link was busy and stood still, and the bytes that it sent in a
  /// second of the busy time.
  static void link_times(const std::vector<RankTraffic>& ranks, int64_t steps) {
    print("\nlink between hosts, ms a step\n{:>6}", "rank");
    for (const auto& part : kLinkParts) print("  {:>15}", part.text);
    print("  {:>15}\n", "busy, MB/s");
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto link = ranks[rank].link.value_or(comm::LinkTimes{});
      print("{:>6}", rank);
      for (const auto& part : kLinkParts)
        print("  {:>15.1f}", link.*part.ms / static_cast<double>(steps));
      print("  {:>15}\n", link.busy > 0 ? fmt::format("{:.1f}", busy_speed(ranks[rank]) * 1e-6)
                                        : std::string("-"));
    }
  }

  static void host_traffic(const std::vector<RankTraffic>& ranks, int64_t steps) {
    print("\ndevice and host a step, bytes (formula beside)\n{:>6}  {:>25}  {:>25}\n", "rank",
          "down", "up");
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto& of = ranks[rank];
      print("{:>6}  {}  {}\n", rank, bytes_cell(of.host.down, of.host_formula.down, steps),
            bytes_cell(of.host.up, of.host_formula.up, steps));
    }
  }

  static void disk_traffic(const std::vector<RankTraffic>& ranks, int64_t steps) {
    print("\ndisk a step, bytes (formula beside)\n{:>6}  {:>25}  {:>25}  {:>12}\n", "rank", "read",
          "written", "waited");
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto& of = ranks[rank];
      print("{:>6}  {}  {}  {:>12}\n", rank, bytes_cell(of.disk.read, of.disk_read_formula, steps),
            bytes_cell(of.disk.written, of.disk_written_formula, steps),
            fmt::format("{:.1f} ms", of.disk.wait_ms / static_cast<double>(steps)));
    }
  }

  static void print_flops(const FlopsReport& report) {
    if (report.file.empty()) return print("\n{}\n", flops_report(report.step, report.options));
    print("\n{}modules in {}\n\n", flops_totals(report.step), report.file);
  }

  static constexpr comm::Collective kTrafficColumns[] = {
      comm::Collective::all_gather, comm::Collective::reduce_scatter, comm::Collective::all_reduce};

  /// Prints a row; `cell` gives a rank's value and formula.
  template <class Cell>
  static void table_row(std::string_view title, const std::vector<RankMemory>& ranks,
                        const Cell& cell) {
    print("{:<18}", title);
    for (const auto& rank : ranks) {
      const auto [value, formula] = cell(rank);
      print("  {:>12} {:>12}", value, formula.empty() ? "" : "(" + formula + ")");
    }
    print("\n");
  }

  static void print_breakdown(const Breakdown& of) {
    print(
        "         ms: forward {:.1f}, backward {:.1f}, step {:.1f}; of these gathers {:.1f}, "
        "reductions {:.1f}, updates {:.1f}, disk {:.1f}, control {:.1f}\n",
        of.forward, of.backward, of.step, of.gather, of.reduce, of.update, of.disk, of.control);
  }

  static std::string skipped(const StepReport& report) {
    if (report.left_out) return "  skipped: its loss is a spike";
    std::string text = "  skipped: a gradient is not finite";
    if (report.loss_scale == 0) return text;
    text += fmt::format(" at loss scale {:g}", report.loss_scale);
    if (report.next_loss_scale != report.loss_scale)
      text += fmt::format(", now {:g}", report.next_loss_scale);
    return text;
  }

  /// Prints a table with a line for each category and a column for each rank, with the formula's
  /// value if there is one.
  static void table(const std::vector<RankMemory>& ranks, bool peak) {
    const auto value = [&](const Usage& usage) {
      return bytes_or_dash(peak ? usage.peak : usage.current);
    };
    print("{:<18}", "");
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      print("  {:>25}", fmt::format("rank {}", rank));
    print("\n");
    bool tiered = false;
    for (size_t i = 0; i < kCategories; ++i) {
      const auto category = static_cast<Category>(i);
      if (category == Category::activations) continue;
      if (category == Category::offload_buffers && ranks[0].disk.bytes == 0) continue;
      const bool held = std::any_of(ranks.begin(), ranks.end(),
                                    [&](const auto& rank) { return rank.usage[i].peak > 0; });
      if (on_host(category) && !held) continue;
      tiered = tiered || on_host(category);
      table_row(name(category), ranks, [&](const RankMemory& rank) {
        const auto formula = rank.formula[i] ? bytes_or_dash(*rank.formula[i]) : "";
        return std::pair(value(rank.usage[i]), formula);
      });
    }
    table_row("total", ranks,
              [&](const RankMemory& rank) { return std::pair(value(rank.total), std::string()); });
    if (tiered) {
      table_row("  on the device", ranks, [&](const RankMemory& rank) {
        return std::pair(value(rank.device), std::string());
      });
    }
    table_row(name(Category::activations), ranks, [&](const RankMemory& rank) {
      return std::pair(value(rank.usage[static_cast<size_t>(Category::activations)]),
                       std::string());
    });
    table_row("  reserved", ranks, [&](const RankMemory& rank) {
      return std::pair(value(rank.reserved), std::string());
    });
    if (ranks[0].disk.bytes > 0) {
      const auto disk_row = [&](std::string_view title, int64_t DiskUse::*bytes) {
        table_row(title, ranks, [&](const RankMemory& rank) {
          return std::pair(bytes_or_dash(rank.disk.*bytes), std::string());
        });
      };
      disk_row("on disk", &DiskUse::bytes);
      disk_row("  read", &DiskUse::read);
      disk_row("  written", &DiskUse::written);
    }
    if (ranks[0].padding > 0)
      print("(padding included: {})\n", format_bytes(static_cast<double>(ranks[0].padding)));
  }

  void clear_bar() {
    if (terminal_) print("\r\033[K");
    drawn_ = false;
  }

  /// Draws "[=====>     ]  42%  1:15 left", as wide as the terminal allows.
  void draw_bar(int64_t step) {
    if (!terminal_ || step == info_.steps) return;
    drawn_ = true;
    winsize size{};
    const int columns =
        ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
    const int width = std::clamp(columns - 40, 10, 60);
    const auto steps = static_cast<double>(info_.steps);
    const int filled =
        static_cast<int>(static_cast<double>(width) * static_cast<double>(step) / steps);
    const double elapsed = std::chrono::duration<double>(Clock::now() - begin_).count();
    const auto done = static_cast<double>(step - info_.first_step + 1);
    print("[{}{}] {:>3.0f}%  step {} of {}, {} left", std::string(static_cast<size_t>(filled), '='),
          std::string(static_cast<size_t>(width - filled), ' '),
          100 * static_cast<double>(step) / steps, step, info_.steps,
          clock_time(elapsed / done * static_cast<double>(info_.steps - step)));
  }

  int64_t log_every_;
  bool on_disk_ = false;
  bool terminal_;
  bool drawn_ = false;  // the terminal's last line is the bar
  RunInfo info_;
  Clock::time_point begin_;
};

}  // namespace

std::unique_ptr<Monitor> console_monitor(int64_t log_every) {
  return std::make_unique<ConsoleMonitor>(log_every);
}

std::string to_text(const Accuracy& accuracy) {
  return fmt::format("accuracy {:.4f} ({} of {} texts)", accuracy.share(), accuracy.correct,
                     accuracy.texts);
}

}  // namespace zero::train
