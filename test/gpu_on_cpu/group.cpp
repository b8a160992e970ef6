#include "group.h"

#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "shim/exchange.h"

namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned kWarp = 32;

// Counts the threads that wait. The last one lets all of them go on.
struct Barrier {
  unsigned size = 0, waiting = 0, phase = 0;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool has_ended = false;
};

struct Group {
  unsigned group, groups;
  const std::function<void()>* run;
  std::vector<Thread> threads;
  Barrier barrier;
  std::vector<Barrier> warps;
  std::vector<char> memory;
  ucontext_t scheduler;
  unsigned current = 0;
  unsigned steps = 0; // threads that have passed a barrier or ended
};

Group* group = nullptr;
unsigned long all_steps = 0; // of all groups

void wait(Barrier& barrier) {
  const unsigned phase = barrier.phase;
  if (++barrier.waiting == barrier.size) {
    barrier.waiting = 0;
    ++barrier.phase;
  }
  while (barrier.phase == phase) {
    swapcontext(&group->threads[group->current].context, &group->scheduler);
  }
  ++group->steps;
  ++all_steps;
}

void run_thread() {
  ++all_steps;
  (*group->run)();
  group->threads[group->current].has_ended = true;
  ++group->steps;
}

void run_group(Group& g) {
  group = &g;
  const auto threads = static_cast<unsigned>(g.threads.size());
  g.barrier = {threads};
  g.warps.assign((threads + kWarp - 1) / kWarp, {});
  for (unsigned i = 0; i < threads; ++i) {
    ++g.warps[i / kWarp].size;
    auto& thread = g.threads[i];
    thread.has_ended = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &g.scheduler;
    makecontext(&thread.context, run_thread, 0);
  }
  for (unsigned ended = 0; ended < threads;) {
    g.steps = ended = 0;
    for (g.current = 0; g.current < threads; ++g.current) {
      if (!g.threads[g.current].has_ended) {
        swapcontext(&g.scheduler, &g.threads[g.current].context);
      }
      ended += g.threads[g.current].has_ended;
    }
    if (g.steps == 0 && ended < threads) {
      throw std::logic_error("threads of a group wait for others that have ended");
    }
  }
}

} // namespace

void gpu_wait_for_group() { wait(group->barrier); }
void gpu_wait_for_warp() { wait(group->warps[group->current / kWarp]); }
void* gpu_warp_memory() { return group->memory.data() + group->current / kWarp * kWarp * kWarpSlot; }
unsigned gpu_lane() { return group->current % kWarp; }
unsigned gpu_thread() { return group->current; }
unsigned gpu_group() { return group->group; }
unsigned gpu_threads() { return static_cast<unsigned>(group->threads.size()); }
unsigned gpu_groups() { return group->groups; }

extern "C" unsigned long gpu_steps() { return all_steps; }

void run_groups(unsigned groups, unsigned threads, const std::function<void()>& thread) {
  Group g{0, groups, &thread, std::vector<Thread>(threads), {}, {}, std::vector<char>(threads * kWarpSlot), {}};
  for (; g.group < groups; ++g.group) {
    run_group(g);
  }
}
