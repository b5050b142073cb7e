// Recorded steps without a server, zoomed and panned together on one time axis.
window.overlapscope.startSteps = (range, steps) => {
  const NARROWEST_PX = 1.25 // so that instants and short spans are visible
  const LOWEST_LABELED_PX = 11
  const [lowest, highest] = range.bounds
  const limits = {shortest: range.min_interval, longest: Infinity, lowest, highest}
  const pen = document.createElement("canvas").getContext("2d")
  pen.font = "11px system-ui, sans-serif"
  const showAll = () => range.setv({start: lowest, end: highest})

  // Widens narrow spans, and names those that are wide enough.
  function fit({spans, labels}, width) {
    const nsPerPx = (range.end - range.start) / width
    const {left, end, top, bottom, text, category} = spans.data
    const right = left.map((ns, i) => Math.max(end[i], ns + NARROWEST_PX * nsPerPx))
    const names = {x: [], y: [], text: [], category: []}
    for (let i = 0; i < left.length; i++) {
      const from = Math.max(left[i], range.start)
      const room = (Math.min(right[i], range.end) - from) / nsPerPx - 10
      if (!text[i] || bottom[i] - top[i] < LOWEST_LABELED_PX || pen.measureText(text[i]).width > room) continue
      names.x.push(from + 5 * nsPerPx)
      names.y.push((top[i] + bottom[i]) / 2)
      names.text.push(text[i])
      names.category.push(category[i])
    }
    spans.data = {...spans.data, right}
    labels.data = names
  }

  for (const step of steps) {
    const {axis, lanes, spans, zoom} = step
    const area = document.getElementById(lanes.name)
    const {el} = Bokeh.index.find_one(lanes)
    const view = window.overlapscope.rangeView({area, figures: [lanes], range, limits, ask: (id, width) => {
      fit(step, width)
      view.answered(id)
    }})

    // The wheel scrolls the page; it zooms a step that has been clicked, or with Ctrl.
    area.addEventListener("focusin", () => zoom.forEach((tool) => (tool.modifiers = {})))
    area.addEventListener("focusout", () => zoom.forEach((tool) => (tool.modifiers = {ctrl: true})))
    for (const figure of [axis, lanes]) figure.on_event("doubletap", showAll)
    const [closer, farther] = [() => view.zoom(0.7), () => view.zoom(1 / 0.7)]
    const [earlier, later] = [() => view.move(-0.2), () => view.move(0.2)]
    window.overlapscope.onKeys({
      "+": closer, "=": closer, w: closer, "-": farther, s: farther,
      ArrowLeft: earlier, a: earlier, ArrowRight: later, d: later,
      0: showAll, Home: showAll,
    }, area)

    const tip = window.overlapscope.tip(el)
    lanes.on_event("mousemove", (event) => {
      const {title, labels, values} = spans.data
      const span = window.overlapscope.spanAt(spans.data, event, (range.end - range.start) / lanes.inner_width)
      if (span < 0) return tip.hide()
      tip.fill(title[span], labels[span], values[span])
      tip.place(event)
    })
    el.addEventListener("mouseleave", tip.hide)
    for (const end of ["start", "end"]) range.properties[end].change.connect(tip.hide)
    view.schedule()
  }
  window.overlapscope.paintPlots()
}
