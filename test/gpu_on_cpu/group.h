// Runs kernels of a GPU on the CPU. The threads of a group are contexts of one thread of the CPU, one of which runs at
// a time, until it waits for the others.
#pragma once

#include <functional>

// Runs the groups of a kernel, one after the other. Throws std::logic_error if threads wait for others that have ended,
// which is undefined on a GPU.
void run_groups(unsigned groups, unsigned threads, const std::function<void()>& thread);
