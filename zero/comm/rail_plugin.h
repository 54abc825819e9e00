/* What a plugin that carries rails gives libzero: an interface in C, so that libzero and the
 * plugin, which is linked to one MPI, may come from different compilers and know nothing of each
 * other's libraries.
 *
 * All functions may be called from any thread. Those with `error` write a text, ended by a zero, of
 * at most `error_size` bytes there where they fail. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of what is below. */
#define ZERO_RAIL_PLUGIN_INTERFACE 1

struct ZeroRailPlugin {
  int32_t interface;   /* ZERO_RAIL_PLUGIN_INTERFACE of when the plugin was built */
  const char* library; /* "Open MPI 4.1.4" */

  /* The end on `host` of a rail that joins the processes `ranks`, one of each of `hosts` hosts, by
   * so many channels; collective over them. Null where it fails. */
  void* (*open)(const int32_t* ranks, int32_t host, int32_t hosts, int32_t channels, char* error,
                size_t error_size);
  /* Tags that it tells apart: 2^bits. */
  int32_t (*tag_bits)(void* rail);
  /* Starts to send or receive `size` bytes. Null where it fails. */
  void* (*post)(void* rail, int32_t sends, int32_t peer, int32_t channel, int32_t tag, void* bytes,
                size_t size, char* error, size_t error_size);
  /* Blocks: 1 when the piece is over, 0 when it was aborted, -1 where it fails or the time is up.
   */
  int32_t (*wait)(void* piece, int64_t milliseconds, char* error, size_t error_size);
  /* A wait for the piece under way, or the next one, returns 0. */
  void (*abort)(void* piece);
  /* Afterwards the piece's memory is not touched any more. A piece that is not over ends all that
   * the plugin does: an MPI cannot take back what it has begun to receive. */
  void (*release)(void* piece);
  /* Every piece of every rail ends as if aborted; later posts fail. */
  void (*stop)(void* rail);
  /* Frees a rail of which no piece is left. */
  void (*close)(void* rail);
};

/* The plugin's one symbol. */
const struct ZeroRailPlugin* zero_rail_plugin(void);

#ifdef __cplusplus
}
#endif
