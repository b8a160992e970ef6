// personalize FOLDER STEPS IDS
//
// Trains an adapter of a language model on a text, and lets the model answer with it. FOLDER has the programs app.pte
// and app-training.pte, which share the weights file app.ptd: docs/training.md exports them. IDS are the token ids of
// the text, such as 0,354,264. The state of the training is kept in FOLDER/adapter.state, and the next run goes on from
// it.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch_mlx/delegate.h>
#include <executorch_mlx/engine.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

// The trained parameters, and the averages of the gradients and of their squares.
struct State {
  int64_t step = 0; // the number of steps that have been made
  std::array<std::vector<float>, 3> vectors;
};

std::vector<EValue> call(Module& training, const std::string& method, const std::vector<EValue>& inputs = {}) {
  const auto results = training.execute(method, inputs);
  if (!results.ok()) {
    throw std::runtime_error(method + ": error " + std::to_string(static_cast<int>(results.error())));
  }
  return *results;
}

// The settings of the training program, JSON.
std::string settings_of(Module& training) {
  const auto results = call(training, "training");
  const auto& text = results[0].toTensor();
  return {text.const_data_ptr<char>(), text.nbytes()};
}

std::string find(const std::string& settings, const std::string& name) {
  std::smatch found;
  if (!std::regex_search(settings, found, std::regex("\"" + name + "\": ([0-9.]+)"))) {
    throw std::runtime_error("the settings of the training lack " + name);
  }
  return found[1];
}

State read_state(Module& training, int64_t step) {
  State state{step, {}};
  const auto results = call(training, "read_state");
  for (size_t i = 0; i < state.vectors.size(); ++i) {
    const auto& vector = results[i].toTensor();
    state.vectors[i].assign(vector.const_data_ptr<float>(), vector.const_data_ptr<float>() + vector.numel());
  }
  return state;
}

// The new file takes the place of the old one at once, so that an app that is ended meanwhile keeps one of them.
void save(const State& state, const std::filesystem::path& path) {
  const auto temporary = path.string() + ".new";
  std::ofstream file(temporary, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&state.step), sizeof(state.step));
  for (const auto& vector : state.vectors) {
    file.write(reinterpret_cast<const char*>(vector.data()), static_cast<std::streamsize>(4 * vector.size()));
  }
  file.close();
  if (!file) {
    throw std::runtime_error(temporary + ": cannot be written");
  }
  std::filesystem::rename(temporary, path);
}

// Gives the program the state in the file, if there is one. Returns the number of steps that have been made.
int64_t restore(Module& training, const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return 0;
  }
  State state = read_state(training, 0); // for the lengths of the vectors
  file.read(reinterpret_cast<char*>(&state.step), sizeof(state.step));
  std::vector<executorch::extension::TensorPtr> tensors;
  for (auto& vector : state.vectors) {
    file.read(reinterpret_cast<char*>(vector.data()), static_cast<std::streamsize>(4 * vector.size()));
    tensors.push_back(from_blob(vector.data(), {static_cast<int>(vector.size())}));
  }
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error(path.string() + ": is of another training program");
  }
  call(training, "write_state", std::vector<EValue>(tensors.begin(), tensors.end()));
  return state.step;
}

// Trains on the text, cut into rows, in `steps` steps. Returns the number of steps that have been made in all runs.
int64_t train(Module& training, const std::string& settings, std::vector<int64_t> text, int64_t done, int64_t steps) {
  const auto batch = std::stoi(find(settings, "batch")), length = std::stoi(find(settings, "length"));
  const auto places = static_cast<size_t>(batch) * static_cast<size_t>(length);
  if (text.size() < 2) {
    throw std::runtime_error("the text needs two tokens");
  }
  const size_t count = std::min(text.size() - 1, places);
  text.resize(places + 1); // a place without a token has a mask of 0
  std::vector<int64_t> targets(text.begin() + 1, text.end());
  std::vector<float> mask(places);
  std::fill_n(mask.begin(), count, 1.0f);
  float lr = 1e-3f;
  for (int64_t step = done + 1; step <= done + steps; ++step) {
    const auto results = call(training, "train_step",
        {EValue(from_blob(text.data(), {batch, length}, ScalarType::Long)),
            EValue(from_blob(targets.data(), {batch, length}, ScalarType::Long)),
            EValue(from_blob(mask.data(), {batch, length})), EValue(from_blob(&lr, {})),
            EValue(from_blob(&step, {}, ScalarType::Long))});
    std::cout << "step " << step << ": loss " << results[0].toTensor().const_data_ptr<float>()[0] << std::endl;
  }
  return done + steps;
}

// Gives the trained matrices to the engine as the adapter "user".
void load_adapter(executorch_mlx::Engine& engine, const std::string& settings, State& state) {
  const float scale = std::stof(find(settings, "alpha")) / std::stof(find(settings, "r"));
  // "tensors": {"model.layers.0.self_attn.q_proj.lora_A": [8, 576], …}, in the order of the vector
  const std::regex pattern("\"([^\"]+)\\.lora_([AB])\": \\[(\\d+), (\\d+)\\]");
  std::vector<std::string> names;
  std::vector<executorch_mlx_adapter_weights> layers;
  float* at = state.vectors[0].data();
  for (std::sregex_iterator found(settings.begin(), settings.end(), pattern), end; found != end; ++found) {
    const size_t rows = std::stoul((*found)[3]), columns = std::stoul((*found)[4]), size = rows * columns;
    if ((*found)[2] == "A") {
      names.push_back((*found)[1]);
      layers.push_back({.layer = nullptr, .rank = rows, .inputs = columns, .outputs = 0, .a = at, .b = nullptr});
    } else {
      std::for_each(at, at + size, [&](float& b) { b *= scale; });
      layers.back().outputs = rows;
      layers.back().b = at;
    }
    at += size;
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].layer = names[i].c_str();
  }
  engine.load_adapter("user", layers);
}

void answer(executorch_mlx::Engine& engine, const std::vector<int64_t>& prompt, const std::string& adapter) {
  executorch_mlx::RequestOptions options;
  options.max_new_tokens = 8;
  options.adapter = adapter;
  std::cout << (adapter.empty() ? "without the adapter:" : "with the adapter:");
  engine
      .submit(prompt, options,
          [](const executorch_mlx::Event& event) {
            if (event.token >= 0) {
              std::cout << " " << event.token;
            }
            return true;
          })
      .wait();
  std::cout << std::endl;
}

} // namespace

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::cerr << "usage: personalize FOLDER STEPS IDS\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  std::vector<int64_t> text;
  std::istringstream ids(argv[3]);
  for (std::string id; std::getline(ids, id, ',');) {
    text.push_back(std::stoll(id));
  }
  executorch_mlx_register(); // before the first load: ExecuTorch keeps the first backend of a name
  Module training((folder / "app-training.pte").string(), (folder / "app.ptd").string(), Module::LoadMode::Mmap);
  const auto settings = settings_of(training);
  const auto done = restore(training, folder / "adapter.state");
  auto state = read_state(training, train(training, settings, text, done, std::atoll(argv[2])));
  save(state, folder / "adapter.state");

  const executorch_mlx::Model model((folder / "app.pte").string());
  executorch_mlx::Engine engine(model);
  load_adapter(engine, settings, state);
  text.resize(1);
  answer(engine, text, "");
  answer(engine, text, "user");
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
