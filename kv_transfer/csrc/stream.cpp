// Chunks of KV between a pool and a connected socket, straight from or into their runs; checksummed burst by burst, while
// the cache has what the kernel has just copied.
#include <cerrno>
#include <sys/socket.h>
#include <sys/uio.h>

#include "kernels.h"
#include "pass.h"

namespace tandem {

// Most buffers of one call (IOV_MAX).
constexpr int kMaxBuffers = 1024;

// A chunk in transfer, and the progress so far; as in kv_transfer/memory/socket_stream.py.
struct Stream {
  int64_t level;
  int64_t fd;
  int64_t is_sending;
  const PoolBlocks* blocks;
  int64_t first_unit;
  Cells cells;
  int64_t burst_bytes;
  Wanted wanted;
  int64_t with_sum;
  int64_t total, bytes, checksum, error;
};

// The next burst of a chunk as buffers of one call.
struct Burst {
  iovec buffers[kMaxBuffers];
  int count = 0;
  int64_t num_bytes = 0;

  Burst(Rest& rest, int64_t room) {
    while (count < kMaxBuffers && room && rest.more()) {
      const int64_t size = rest.left() < room ? rest.left() : room;
      buffers[count++] = {rest.at(), static_cast<size_t>(size)};
      rest.drop(size);
      room -= size;
      num_bytes += size;
    }
  }
};

uint32_t sum_of(const Burst& burst, int64_t count, Level level, uint32_t state) {
  for (const iovec* buffer = burst.buffers; count; ++buffer) {
    const size_t size = buffer->iov_len < static_cast<size_t>(count) ? buffer->iov_len : static_cast<size_t>(count);
    state = run<Store::kHot, true>(level, static_cast<const uint8_t*>(buffer->iov_base), nullptr, size, state);
    count -= static_cast<int64_t>(size);
  }
  return state;
}

// One non-blocking call; bytes moved, or -1 with errno.
int64_t move_some(const Stream& stream, Burst& burst) {
  msghdr message{};
  message.msg_iov = burst.buffers;
  message.msg_iovlen = static_cast<size_t>(burst.count);
  const int fd = static_cast<int>(stream.fd);
  for (;;) {
    const ssize_t count = stream.is_sending ? sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                                            : recvmsg(fd, &message, MSG_DONTWAIT);
    if (count >= 0 || errno != EINTR) return count;
  }
}

int64_t go_on(Stream& stream) {
  while (stream.bytes < stream.total) {
    Rest rest(Walk(*stream.blocks, stream.cells, stream.first_unit), stream.bytes);
    for (;;) {
      Burst burst(rest, stream.burst_bytes);
      if (!burst.count) break;
      const int64_t count = move_some(stream, burst);
      if (count < 0) {
        stream.error = errno;
        return errno == EAGAIN || errno == EWOULDBLOCK ? kBlocked : kFailed;
      }
      if (!count) return kEnded;
      stream.bytes += count;
      if (stream.with_sum)
        stream.checksum = static_cast<uint32_t>(
            ~sum_of(burst, count, static_cast<Level>(stream.level), ~static_cast<uint32_t>(stream.checksum)));
      if (stream.bytes < stream.total && stream.wanted.any()) return kPaused;
      if (count < burst.num_bytes) break;
    }
  }
  return kDone;
}

}  // namespace tandem

// Bytes of the stream's cells; negative when they are not there. Before the first call of the other.
TANDEM_EXPORT int64_t tandem_stream_open(tandem::Stream* stream) {
  if (!tandem::contains(*stream->blocks, stream->cells, stream->first_unit)) return tandem::kOutside;
  tandem::Walk walk(*stream->blocks, stream->cells, stream->first_unit);
  uint8_t* begin = nullptr;
  for (int64_t length = 0; walk.next(begin, length);) stream->total += length;
  return stream->total;
}

// Continues until kDone or one of: kPaused, another thread wants the lock; kBlocked, no bytes have arrived or there is
// no room; kEnded, the peer has closed; kFailed, see `error`.
TANDEM_EXPORT int64_t tandem_stream_advance(tandem::Stream* stream) { return tandem::go_on(*stream); }
