// Reads Python's pickles without running anything, and writes the few kinds of pickles that libzero
// needs.
//
// Note [Pickles]
// A pickle is a program for a stack machine that may call any function of Python. This reader makes
// no call: it keeps each call (the function's name and its arguments) as a value. Code that reads a
// checkpoint looks at the names that it knows, and skips the others. Values belong to the Pickle. A
// value may occur in several places, or within itself, so code that walks over values must count
// its steps (kMostSteps) and its depth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zero::foreign {

/// Limits of a pickle. A file that needs more is refused before it fills the memory.
inline constexpr size_t kMostValues = size_t{1} << 24;
inline constexpr size_t kMostSteps = size_t{1} << 22;
inline constexpr int kMostDepth = 64;

struct Value {
  enum class Kind : uint8_t {
    none,
    boolean,
    integer,
    large,  ///< an integer beyond 64 bits: `text` has its little-endian bytes
    real,
    text,  ///< UTF-8 text, or bytes
    list,
    tuple,
    dict,       ///< `items` has keys and values by turns; an OrderedDict is one too
    global,     ///< `text` is "module.name"
    object,     ///< the result of calling `callee` with the tuple `arguments`
    persistent  ///< a reference that the program defines itself: `arguments`
  };
  Kind kind = Kind::none;
  union {
    int64_t integer = 0;
    double real;
  };
  std::string_view text;
  std::vector<const Value*> items;
  const Value* callee = nullptr;
  const Value* arguments = nullptr;
  const Value* state = nullptr;  ///< the value that BUILD gave to an object, or null

  bool is(Kind what) const { return kind == what; }
  bool is_sequence() const { return kind == Kind::list || kind == Kind::tuple; }
  /// Returns whether this is a call of the function, or an object of the class, of that name.
  bool is_call(std::string_view name) const;
  /// Returns whether this is an object of a class with this last name, such as "LossScaler".
  bool is_instance(std::string_view last_name) const;
  /// Returns argument `index` of a call, or null.
  const Value* argument(size_t index) const;
  /// Returns the value of a dict, or of an object's state, by its key, or null.
  const Value* find(std::string_view key) const;
  /// Returns the member of that name in an object's state, or else argument `position` of its
  /// constructor.
  const Value* member(std::string_view name, size_t position) const;
  std::optional<int64_t> as_integer() const;  ///< also of a boolean
  std::optional<double> as_number() const;    ///< of any number
  std::optional<std::string> as_text() const;
  /// Returns the numbers of a list, a tuple or a torch.Size.
  std::optional<std::vector<int64_t>> as_sizes() const;
  /// Returns the value as JSON text; nothing if a part of it has no such form (an object, a
  /// tensor).
  std::optional<std::string> as_json() const;
};

class Pickle {
 public:
  /// Reads the pickle that `bytes` begins with. Throws CheckpointError, which says what is wrong
  /// and at which byte ("byte 12: opcode 'x' is unknown"), without a full stop.
  explicit Pickle(std::string bytes);
  Pickle(Pickle&&) = default;
  Pickle& operator=(Pickle&&) = default;

  const Value& root() const { return *root_; }
  /// Returns the number of bytes of the pickle.
  size_t size() const { return size_; }

 private:
  friend class PickleMachine;
  std::unique_ptr<const std::string> bytes_;
  std::unique_ptr<std::deque<Value>> values_;
  std::unique_ptr<std::deque<std::string>> texts_;
  const Value* root_ = nullptr;
  size_t size_ = 0;
};

/// Puts the text of a pickle (protocol 2) together from parts: each function returns the opcodes of
/// a value.
namespace pickled {
std::string text(std::string_view value);
std::string integer(int64_t value);
std::string real(double value);
std::string boolean(bool value);
std::string none();
std::string global(std::string_view module, std::string_view name);
std::string tuple(const std::vector<std::string>& items);
std::string list(const std::vector<std::string>& items);
std::string dict(const std::vector<std::pair<std::string, std::string>>& items);
std::string call(const std::string& function, const std::vector<std::string>& arguments);
std::string sizes(const std::vector<int64_t>& sizes);  ///< a torch.Size
/// Returns the pickle of one value.
std::string whole(const std::string& value);
}  // namespace pickled

}  // namespace zero::foreign
