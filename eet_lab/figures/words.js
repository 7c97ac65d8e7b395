// Numbers as eet_lab/words.py writes them. It stands in front of a view's own module: a view can import nothing.

function plain(value, digits = 4) {
  if (!Number.isFinite(value)) return "–";
  const shown = Number(value.toPrecision(digits));
  const [digit, power] = shown.toExponential().split("e");
  const whole = shown ? Number(power) + 1 : 1;
  if (whole < -3) return `${digit} × 10⁻${Math.abs(power).toString().replace(/\d/g, (each) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[each])}`;
  return shown.toLocaleString("en", { maximumFractionDigits: Math.min(Math.max(digits - whole, 0), 20) }).replace(/^-0$/, "0");
}

function brief(value, digits = 3) {
  if (Number.isFinite(value) && Math.abs(value) >= 10 ** digits) return Math.round(value).toLocaleString("en");
  return plain(value, digits);
}
