// Streams from a trained model; the state is a value: a copy of it goes on in the same way.
// usage: generate FOLDER PROMPT
#include <exception>
#include <iostream>
#include <string>
#include <string_view>

#include <ouzel/ouzel.h>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: generate FOLDER PROMPT\n";
    return 2;
  }
  try {
    ouzel::Context context;
    const ouzel::Model model = ouzel::Model::load(context, argv[1]);
    ouzel::Generator generator(context, model, {.temperature = 0.7});
    generator.read(argv[2]);
    const ouzel::State fork = generator.state();

    std::string first, second;
    const auto append_to = [](std::string& text) {
      return [&text](std::string_view piece) {
        text += piece;
        return true;
      };
    };
    generator.generate(100, append_to(first));
    ouzel::Generator again(context, model, fork);
    again.generate(100, append_to(second));

    std::cout << argv[2] << first << '\n';
    return first == second ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << '\n';
    return 1;
  }
}
