// The wire format of protocol buffers (protobuf.dev, "Encoding"), as much of it as monitors' files
// have. By hand, since LibTorch brings a protobuf library of its own: docs/architecture.md, "A
// library that must not come along".
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace zero::train::protobuf {

/// `value` in `bytes` bytes, the least significant first.
inline void append_little_endian(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

inline uint64_t read_little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes.size(); ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return value;
}

inline void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

/// Appends fields to a message. What it writes to is the caller's, who may use it again, so that a
/// step allocates nothing.
class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  void integer(int field, int64_t value) {
    key(field, 0);
    append_varint(out_, static_cast<uint64_t>(value));
  }
  void number(int field, double value) {
    key(field, 1);
    append_little_endian(out_, std::bit_cast<uint64_t>(value), 8);
  }
  void number(int field, float value) {
    key(field, 5);
    append_little_endian(out_, std::bit_cast<uint32_t>(value), 4);
  }
  void bytes(int field, std::string_view value) {
    key(field, 2);
    append_varint(out_, value.size());
    out_ += value;
  }
  /// A message in this one, whose fields `body` writes.
  template <class Body>
  void message(int field, const Body& body) {
    key(field, 2);
    const size_t begin = out_.size();
    body(*this);
    uint64_t length = out_.size() - begin;
    char prefix[10];
    size_t count = 0;
    for (; length >= 0x80; length >>= 7) prefix[count++] = static_cast<char>(length | 0x80);
    prefix[count++] = static_cast<char>(length);
    out_.insert(begin, prefix, count);
  }

 private:
  void key(int field, uint64_t type) {
    append_varint(out_, static_cast<uint64_t>(field) << 3 | type);
  }

  std::string& out_;
};

struct Field {
  int number = 0;
  uint64_t value = 0;        ///< of an integer or a number: its bits
  std::string_view bytes{};  ///< of a text or a message
};

/// The fields of a message, one after the other.
class Reader {
 public:
  explicit Reader(std::string_view message) : left_(message) {}

  /// None at the end, and where there is no whole field.
  std::optional<Field> next() {
    const auto key = varint();
    if (!key) return std::nullopt;
    Field field;
    field.number = static_cast<int>(*key >> 3);
    const uint64_t type = *key & 7;
    if (type == 0) {
      const auto value = varint();
      if (!value) return std::nullopt;
      field.value = *value;
      return field;
    }
    const auto length = type == 2   ? varint()
                        : type == 1 ? std::optional<uint64_t>(8)
                        : type == 5 ? std::optional<uint64_t>(4)
                                    : std::nullopt;
    if (!length || *length > left_.size()) return std::nullopt;
    field.bytes = left_.substr(0, *length);
    left_.remove_prefix(*length);
    if (type != 2) field.value = read_little_endian(field.bytes);
    return field;
  }

 private:
  std::optional<uint64_t> varint() {
    uint64_t value = 0;
    for (size_t i = 0; i < left_.size() && i < 10; ++i) {
      const auto byte = static_cast<unsigned char>(left_[i]);
      value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if (byte < 0x80) {
        left_.remove_prefix(i + 1);
        return value;
      }
    }
    return std::nullopt;
  }

  std::string_view left_;
};

}  // namespace zero::train::protobuf
