// Calls of any row of the table of operators, by the names of their tensors.
#pragma once

#include <string>
#include <vector>

#include "tests/calls.h"

namespace ouzel::test {

// Whether the table has the operator.
bool is_operator(const std::string& name);
// Whether it is among reference::law_names().
bool is_law(const std::string& op);
// Whether it, or what it is an alias of, is among reference::named_references().
bool has_named_reference(const std::string& op);

void add_slots(std::vector<Slot>& list, ByName& call);
// By the public API where it is a matrix law, else by the table.
Results<float> run(Context& context, const Call& call, const ByName& arguments);
Results<float> run_by_table(Context& context, const Call& call);
Results<float> run_steps(Context& context, const Call& call, const ByName& arguments);
Results<double> run_reference(const Call& call, const ByName& arguments);
// Of the call, its upstream gradients and form count only.
Results<double> run_reference(const Call& call, const reference::LawArguments<double>& arguments);

}  // namespace ouzel::test
