// Trains a small language model on the bytes of a file.
// usage: train FILE FOLDER
#include <exception>
#include <iostream>

#include <ouzel/ouzel.h>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: train FILE FOLDER\n";
    return 2;
  }
  try {
    ouzel::TrainOptions options;
    options.model = ouzel::ModelConfig::defaults("retnet");
    options.model.hidden_size = 64;
    options.model.num_hidden_layers = 2;
    options.data = argv[1];
    options.out = argv[2];
    options.context = 64;
    options.batch = 8;
    options.iterations = 40;

    ouzel::Context context;
    const ouzel::TrainResult result =
        ouzel::train(context, options, [](const ouzel::TrainProgress& progress) {
          if (progress.iteration % 10 == 0) {
            std::cout << progress.iteration << ": " << progress.loss << " nats a byte\n";
          }
        });
    return result.iteration == options.iterations ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "train: " << error.what() << '\n';
    return 1;
  }
}
