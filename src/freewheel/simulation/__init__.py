"""Virtual time and fakes: the real controller without processes, models or waiting."""
