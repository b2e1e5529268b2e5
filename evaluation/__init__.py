"""How predictions are judged: accuracy and calibration with their uncertainties."""
