// Where in the user's script a call came from: the innermost Python frame that belongs neither to
// hvdtorch nor to torch.
#pragma once

#include <string>

namespace hvdtorch {

// Directories (with a trailing '/') whose frames are passed over. Needs the interpreter's lock.
void set_library_directories(std::string own, std::string torch);

// "train.py:31", or "" when no such frame exists. Needs the interpreter's lock.
std::string current_site();

}  // namespace hvdtorch
