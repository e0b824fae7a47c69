"""What commands need before they begin: data folder, store, limits, facts of servers."""
