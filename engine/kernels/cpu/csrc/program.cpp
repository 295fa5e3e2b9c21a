// Replays a recorded sequence of kernel calls in one call: the Python code between the kernels of a decode step costs
// as much as some of the kernels. See engine/kernels/cpu/program.py.
#include <cstring>
#include <utility>

#include "parallel.h"

namespace tandem {
namespace {

using Pointer = void*;
using Int = int64_t;
using Real = float;

// One argument; which of them, the kernel's signature says.
union Slot {
  Pointer pointer;
  Int integer;
  Real real;
};

template <class T>
T get(const Slot& slot);
template <>
Pointer get<Pointer>(const Slot& slot) {
  return slot.pointer;
}
template <>
Int get<Int>(const Slot& slot) {
  return slot.integer;
}
template <>
Real get<Real>(const Slot& slot) {
  return slot.real;
}

using Invoker = void (*)(Pointer kernel, const Slot* slots);

// Calls a kernel of these argument types.
template <class... Arguments>
struct Call {
  static void invoke(Pointer kernel, const Slot* slots) {
    unpack(reinterpret_cast<void (*)(Arguments...)>(kernel), slots, std::index_sequence_for<Arguments...>{});
  }

  template <size_t... index>
  static void unpack(void (*kernel)(Arguments...), const Slot* slots, std::index_sequence<index...>) {
    kernel(get<Arguments>(slots[index])...);
  }
};

constexpr int kMostSlots = 9;

struct Command {
  Pointer kernel;
  Invoker invoker;
  Slot slots[kMostSlots];
};

struct Signature {
  const char* letters;
  Invoker invoker;
};

// Of the kernels that a decoder layer is made of.
constexpr Signature kSignatures[] = {
    {"ppiipii", Call<Pointer, Pointer, Int, Int, Pointer, Int, Int>::invoke},          // projections
    {"ppiippii", Call<Pointer, Pointer, Int, Int, Pointer, Pointer, Int, Int>::invoke},  // mixtures of experts
    {"pippiifi", Call<Pointer, Int, Pointer, Pointer, Int, Int, Real, Int>::invoke},   // norm
    {"pipppiifi", Call<Pointer, Int, Pointer, Pointer, Pointer, Int, Int, Real, Int>::invoke},  // addition and norm
    {"ppippf", Call<Pointer, Pointer, Int, Pointer, Pointer, Real>::invoke},           // rotation and write
    {"ppippi", Call<Pointer, Pointer, Int, Pointer, Pointer, Int>::invoke},            // other norms, adapters
    {"ppiii", Call<Pointer, Pointer, Int, Int, Int>::invoke},                          // silu's gate
    {"ppii", Call<Pointer, Pointer, Int, Int>::invoke},                                // norms in place
    {"pipiiii", Call<Pointer, Int, Pointer, Int, Int, Int, Int>::invoke},              // gelu's gate
    {"pifi", Call<Pointer, Int, Real, Int>::invoke},                                   // soft caps
    {"pppipi", Call<Pointer, Pointer, Pointer, Int, Pointer, Int>::invoke},            // attention of chunks
    {"pppipii", Call<Pointer, Pointer, Pointer, Int, Pointer, Int, Int>::invoke},      // attention of single rows
};

}  // namespace
}  // namespace tandem

// Returns the invoker for kernels of this signature; null when there is none.
TANDEM_EXPORT tandem::Invoker tandem_invoker(const char* letters) {
  for (const tandem::Signature& known : tandem::kSignatures)
    if (std::strcmp(known.letters, letters) == 0) return known.invoker;
  return nullptr;
}

TANDEM_EXPORT void tandem_run_program(const tandem::Command* commands, int64_t count) {
  for (int64_t i = 0; i < count; ++i) commands[i].invoker(commands[i].kernel, commands[i].slots);
}
