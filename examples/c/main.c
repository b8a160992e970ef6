// answers MODEL.pte COUNT IDS...
//
// Answers several prompts at the same time. Each IDS is a prompt: token ids, such as 0,354,264. An answer has at most
// COUNT tokens. Prints one line per answer.
#include <executorch_mlx/executorch_mlx.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The text of an answer, which grows.
typedef struct {
  char* text;
  size_t length;
} Answer;

// Called on the engine's thread.
static bool on_event(void* user_data, const executorch_mlx_event* event) {
  Answer* answer = user_data;
  char* longer = realloc(answer->text, answer->length + event->text_length + 1);
  if (longer == NULL) {
    return false; // cancels the request
  }
  memcpy(longer + answer->length, event->text, event->text_length);
  answer->text = longer;
  answer->length += event->text_length;
  longer[answer->length] = '\0';
  return true;
}

static int fail(const char* what, const char* message) {
  fprintf(stderr, "%s: %s\n", what, message);
  return 1;
}

// Reads ids such as 0,354,264, and returns their number, or 0 if `text` is malformed. `ids` needs room for one id per
// character of `text`.
static size_t parse_ids(const char* text, int64_t* ids) {
  size_t count = 0;
  for (char* end = NULL; *text != '\0'; text = *end == ',' ? end + 1 : end) {
    ids[count++] = strtoll(text, &end, 10);
    if (end == text) {
      return 0;
    }
  }
  return count;
}

int main(int argc, char** argv) {
  if (argc < 4) {
    return fail("usage", "answers MODEL.pte COUNT IDS...");
  }
  executorch_mlx_model* model = NULL;
  executorch_mlx_engine* engine = NULL;
  if (executorch_mlx_model_load(argv[1], NULL, &model) != EXECUTORCH_MLX_OK ||
      executorch_mlx_engine_create(model, NULL, &engine) != EXECUTORCH_MLX_OK) {
    return fail("load", executorch_mlx_last_error());
  }

  const int count = argc - 3;
  int status = 0;
  Answer* answers = calloc(count, sizeof(Answer));
  executorch_mlx_request** requests = calloc(count, sizeof(*requests));
  for (int i = 0; i < count; ++i) {
    int64_t* ids = malloc((strlen(argv[i + 3]) + 1) * sizeof(int64_t));
    executorch_mlx_request_options options = EXECUTORCH_MLX_REQUEST_OPTIONS;
    options.prompt = ids;
    options.prompt_length = parse_ids(argv[i + 3], ids);
    options.max_new_tokens = strtoll(argv[2], NULL, 10);
    options.on_event = on_event;
    options.user_data = &answers[i];
    if (executorch_mlx_engine_submit(engine, &options, &requests[i]) != EXECUTORCH_MLX_OK) {
      status = fail(argv[i + 3], executorch_mlx_last_error());
    }
    free(ids); // submit() has copied them
  }
  for (int i = 0; i < count; ++i) {
    if (requests[i] == NULL) {
      continue;
    }
    executorch_mlx_request_wait(requests[i], -1);
    executorch_mlx_request_info info = {.size = sizeof(info)};
    executorch_mlx_request_get_info(requests[i], &info);
    if (info.finish == EXECUTORCH_MLX_FINISH_ERROR) {
      status = fail(argv[i + 3], executorch_mlx_request_error(requests[i]));
    } else {
      printf("%s\n", answers[i].text);
      fprintf(stderr, "%lld tokens, %lld of the prompt reused\n", (long long)info.generated_tokens,
          (long long)info.reused_tokens);
    }
    executorch_mlx_request_free(requests[i]);
    free(answers[i].text);
  }
  free(requests);
  free(answers);
  executorch_mlx_engine_free(engine);
  executorch_mlx_model_free(model);
  return status;
}
