// Writes streamed tokens to their clients' sockets: one call for each message of a worker.
//
// What is written here and what is not: router/fleet/native_streams.py. Called from one thread, the event loop's.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Table {  // the texts of a vocabulary, escaped for JSON; an empty one is for Python to make
    const char* text;
    const int64_t* offsets;
    int64_t size;
};

struct Stream {
    Table table;
    std::string before, after;
    std::vector<int64_t> stop_ids;
    int64_t next_index;
    int64_t most_tokens;
    int descriptor;  // a duplicate of its own: whoever closes the connection, no other one gets its number meanwhile
    double last_s, ends_s;
    std::vector<int64_t> token_ids;
    std::vector<double> gaps_s;

    ~Stream() { close(descriptor); }

    bool takes(int64_t index, int64_t token_id, double now_s) const {
        if (index != next_index || most_tokens == 0 || now_s >= ends_s) return false;
        if (token_id < 0 || token_id >= table.size) return false;
        for (int64_t stop : stop_ids)
            if (stop == token_id) return false;
        return table.offsets[token_id] != table.offsets[token_id + 1];
    }

    void accept(int64_t token_id, double now_s, std::string& body) {
        body += before;
        body.append(table.text + table.offsets[token_id], table.offsets[token_id + 1] - table.offsets[token_id]);
        body += after;
        token_ids.push_back(token_id);
        gaps_s.push_back(now_s - last_s);
        last_s = now_s;
        ++next_index;
        --most_tokens;
    }
};

struct Streams {
    std::unordered_map<int64_t, std::unique_ptr<Stream>> by_handle;
    std::string body, chunk;
    std::string unsent;  // what the sockets did not take in the last step
};

// Sends all of `bytes`, or as much as the socket takes now; returns how many were sent.
size_t send_now(int descriptor, const std::string& bytes) {
    ssize_t sent;
    do sent = send(descriptor, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? 0 : size_t(sent);
}

}  // namespace

EXPORT void* native_streams_new() { return new Streams; }

EXPORT void native_streams_free(void* streams) { delete static_cast<Streams*>(streams); }

struct Offer {
    int64_t handle, descriptor, next_index, most_tokens;
    const char* text;
    const int64_t* offsets;
    int64_t vocabulary;
    const char* before;
    int64_t before_length;
    const char* after;
    int64_t after_length;
    const int64_t* stop_ids;
    int64_t num_stop_ids;
};

// Returns 1, or 0 where the descriptor cannot be duplicated.
EXPORT int64_t native_streams_open(void* streams, const Offer* offer, double last_s, double ends_s) {
    int descriptor = fcntl(int(offer->descriptor), F_DUPFD_CLOEXEC, 0);
    if (descriptor < 0) return 0;
    auto stream = std::make_unique<Stream>();
    stream->descriptor = descriptor;
    stream->table = {offer->text, offer->offsets, offer->vocabulary};
    stream->before.assign(offer->before, offer->before_length);
    stream->after.assign(offer->after, offer->after_length);
    stream->stop_ids.assign(offer->stop_ids, offer->stop_ids + offer->num_stop_ids);
    stream->next_index = offer->next_index;
    stream->most_tokens = offer->most_tokens;
    stream->last_s = last_s;
    stream->ends_s = ends_s;
    static_cast<Streams*>(streams)->by_handle[offer->handle] = std::move(stream);
    return 1;
}

// Ends a stream, which must be there; returns the number of tokens that it has written, whose ids and gaps are copied out.
EXPORT int64_t native_streams_close(void* streams, int64_t handle, int64_t* token_ids, double* gaps_s) {
    auto& by_handle = static_cast<Streams*>(streams)->by_handle;
    auto found = by_handle.find(handle);
    const Stream& stream = *found->second;
    std::copy(stream.token_ids.begin(), stream.token_ids.end(), token_ids);
    std::copy(stream.gaps_s.begin(), stream.gaps_s.end(), gaps_s);
    int64_t count = int64_t(stream.token_ids.size());
    by_handle.erase(found);
    return count;
}

// Writes the tokens of one message. `left` gets the positions of those that Python has to handle, in order. Instead,
// -1 - p says that the socket did not take all of the chunk that ends with the token at p: Python has to write the rest,
// whose length `unsent` gets at the same place; the rests follow each other at `*bytes`. Returns the length of `left`.
EXPORT int64_t native_streams_write(void* opaque, const int64_t* handles, const int64_t* indexes,
                                    const int64_t* token_ids, int64_t count, double now_s, int64_t* left,
                                    int64_t* unsent, const char** bytes) {
    Streams& streams = *static_cast<Streams*>(opaque);
    streams.unsent.clear();
    int64_t num_left = 0;
    for (int64_t i = 0; i < count;) {
        auto found = streams.by_handle.find(handles[i]);
        if (found == streams.by_handle.end() || !found->second->takes(indexes[i], token_ids[i], now_s)) {
            // Until Python has handled it, later tokens of this stream are not next.
            left[num_left++] = i++;
            continue;
        }
        Stream& stream = *found->second;
        streams.body.clear();
        int64_t last = i;
        do {
            stream.accept(token_ids[i], now_s, streams.body);
            last = i++;
        } while (i < count && handles[i] == handles[last] && stream.takes(indexes[i], token_ids[i], now_s));
        char head[24];
        int length = snprintf(head, sizeof head, "%zx\r\n", streams.body.size());
        streams.chunk.assign(head, size_t(length));
        streams.chunk += streams.body;
        streams.chunk += "\r\n";
        size_t sent = send_now(stream.descriptor, streams.chunk);
        if (sent < streams.chunk.size()) {
            stream.most_tokens = 0;  // Python writes the rest, and decides how this goes on
            unsent[num_left] = int64_t(streams.chunk.size() - sent);
            left[num_left++] = -1 - last;
            streams.unsent.append(streams.chunk, sent, std::string::npos);
        }
    }
    *bytes = streams.unsent.data();
    return num_left;
}
