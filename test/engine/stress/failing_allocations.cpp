// failing_allocations MODEL.pte
//
// Lets one allocation of the engine's thread fail in each request: in the first one the first allocation after the
// first token, then the second one, and so on, until a request ends before the allocation that would fail. In the
// model, token t is followed by t + 1. Prints how many requests failed and how many answers were wrong.
#include <executorch_mlx/executorch_mlx.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <new>

namespace {

thread_local long allocations_left = -1; // until one fails; negative: none fails

void* allocate(size_t size) {
  if (allocations_left >= 0 && allocations_left-- == 0) {
    throw std::bad_alloc();
  }
  void* const memory = std::malloc(size > 0 ? size : 1);
  return memory != nullptr ? memory : throw std::bad_alloc();
}

constexpr int64_t kStart = 5, kLength = 8;

struct Answer {
  long first_failure = -1; // -1: none
  long rest = -1; // of allocations_left at the end
  int64_t count = 0;
  bool is_right = true;
};

bool on_event(void* user_data, const executorch_mlx_event* event) {
  auto& answer = *static_cast<Answer*>(user_data);
  if (event->token >= 0) {
    answer.is_right = answer.is_right && event->token == kStart + ++answer.count;
  }
  if (event->token >= 0 && answer.count == 1) {
    allocations_left = answer.first_failure;
  } else if (event->finish != EXECUTORCH_MLX_RUNNING) {
    answer.rest = allocations_left;
    allocations_left = -1;
  }
  return true;
}

// Returns the status of a request.
executorch_mlx_status generate(executorch_mlx_engine* engine, Answer& answer) {
  executorch_mlx_request_options options = EXECUTORCH_MLX_REQUEST_OPTIONS;
  options.prompt = &kStart;
  options.prompt_length = 1;
  options.max_new_tokens = kLength;
  options.on_event = on_event;
  options.user_data = &answer;
  executorch_mlx_request* request = nullptr;
  if (const auto status = executorch_mlx_engine_submit(engine, &options, &request)) {
    return status;
  }
  executorch_mlx_request_wait(request, -1);
  executorch_mlx_request_info info = {};
  info.size = sizeof(info);
  executorch_mlx_request_get_info(request, &info);
  executorch_mlx_request_free(request);
  return info.status;
}

} // namespace

void* operator new(size_t size) { return allocate(size); }
void* operator new[](size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

int main(int argc, char** argv) {
  executorch_mlx_model* model = nullptr;
  executorch_mlx_engine* engine = nullptr;
  if (argc != 2 || executorch_mlx_model_load(argv[1], nullptr, &model) != EXECUTORCH_MLX_OK ||
      executorch_mlx_engine_create(model, nullptr, &engine) != EXECUTORCH_MLX_OK) {
    return 2;
  }
  int failed = 0, wrong = 0;
  for (long n = 0;; ++n) {
    Answer answer = {.first_failure = n};
    const auto status = generate(engine, answer);
    Answer next; // a failure changes no later answer
    wrong += !answer.is_right || (status != EXECUTORCH_MLX_OK && status != EXECUTORCH_MLX_OUT_OF_MEMORY) ||
        generate(engine, next) != EXECUTORCH_MLX_OK || !next.is_right || next.count != kLength;
    failed += status != EXECUTORCH_MLX_OK;
    if (answer.rest >= 0) {
      break;
    }
  }
  executorch_mlx_engine_free(engine);
  executorch_mlx_model_free(model);
  std::cout << failed << " failed, " << wrong << " wrong\n";
  return wrong != 0;
}
