// Slider, mouse, keys and address of the Buckets page. dashboards/pages/buckets.py answers: this script
// sends it the choice, at most one request at a time, and waits for the response.
window.overlapscope.startBuckets = (plot) => {
  const element = (id) => document.getElementById(id)
  const address = new URLSearchParams(location.search)
  const chosen = {cap_mb: null, special: "", first_mb: null, is_compressed: false}

  // --- requests -------------------------------------------------------------------------------------------------
  let asked = 0
  let waiting = false
  let wanted = null

  function choose(changes, move = 0) {
    wanted = {...chosen, ...wanted, ...changes, move: (wanted?.move ?? 0) + move}
    // A size chosen after key presses replaces them.
    if ("cap_mb" in changes || "special" in changes) wanted.move = move
    askNow()
  }

  function askNow() {
    if (waiting || !wanted) return
    waiting = true
    asked += 1
    const width_px = Math.max(50, Math.round(plot.steps.inner_width || 1000))
    const question = {id: asked, ...wanted, width_px}
    wanted = null
    plot.asked.data = Object.fromEntries(Object.entries(question).map(([name, value]) => [name, [value]]))
    setTimeout(() => (element("busy").hidden = !waiting), 250)
  }

  function answered() {
    for (const view of held.splice(0)) view.unpause()
    const {id, cap_mb, shown_mb, special, first_mb, is_compressed, chosen: figures, breakdown} = plot.answer.data
    waiting = false
    element("busy").hidden = true
    Object.assign(chosen, {
      cap_mb: cap_mb[0], special: special[0], first_mb: first_mb[0], is_compressed: is_compressed[0],
    })
    element("chosen").innerHTML = figures[0]
    if (element("head")) element("head").innerHTML = breakdown[0]
    showChosen(shown_mb[0])
    rememberSoon()
    document.body.dataset.answered = id[0]
    document.querySelector("main").ariaBusy = "false"
    askNow()
  }

  // A response comes as one message per source; drawing after each of them would cost several frames.
  const views = [plot.root, plot.steps, plot.plan].map((figure) => Bokeh.index.find_one(figure))
  const held = []
  function holdDrawing() {
    if (!waiting || held.length) return
    for (const view of views) {
      view.pause()
      held.push(view)
    }
  }

  // --- the choice on the page -------------------------------------------------------------------------------------
  const slider = element("size")
  const text = (mb) => `${Number(mb.toPrecision(3)).toLocaleString("en-US")} MB`

  function showScale() {
    slider.min = Math.log10(plot.size_range.start)
    slider.max = Math.log10(plot.size_range.end)
  }

  function showChosen(shown_mb) {
    const {cap_mb, special} = chosen
    if (shown_mb != null && !isSliding) slider.value = Math.log10(shown_mb)
    slider.classList.toggle("nowhere", shown_mb == null)
    const size = cap_mb == null || special === "default" ? "–" : text(cap_mb)
    element("size-text").textContent = size
    let name = size
    for (const button of document.querySelectorAll("[data-plan]")) {
      const isIt = special !== "" && button.dataset.plan === special
      button.setAttribute("aria-pressed", isIt)
      if (isIt) name = button.textContent
    }
    slider.ariaValueText = name
    element("predicted-title").textContent = `Predicted: ${name}`
  }

  let remembering
  function rememberSoon() {
    clearTimeout(remembering)
    const {cap_mb, special, first_mb, is_compressed} = chosen
    const entries = {
      cap_mb: special || cap_mb == null ? null : Number(cap_mb.toPrecision(6)),
      plan: special || null,
      first: first_mb,
      compression: is_compressed ? "fp16" : null,
    }
    remembering = setTimeout(() => window.overlapscope.setAddress(entries), 150)
  }

  // --- choosing -------------------------------------------------------------------------------------------------
  const pick = (special) => choose({special, cap_mb: null})
  const pickSize = (cap_mb) => choose({special: "", cap_mb})
  const step = (by) => choose({}, by)

  let isSliding = false
  slider.addEventListener("input", () => {
    isSliding = true
    element("size-text").textContent = text(10 ** slider.value)
    pickSize(10 ** slider.value)
  })
  slider.addEventListener("change", () => (isSliding = false))
  // One key press is one partition, wherever the slider is.
  slider.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 5, PageDown: -5}[event.key]
    if (!by) return
    event.preventDefault()
    event.stopPropagation()
    step(by)
  })

  for (const click of ["tap", "doubletap"]) {
    plot.root.on_event(click, ({x}) => {
      if (x >= plot.size_range.start && x <= plot.size_range.end) pickSize(x)
    })
  }
  for (const button of document.querySelectorAll("[data-plan]")) {
    button.addEventListener("click", () => pick(button.dataset.plan))
  }

  for (const radio of document.querySelectorAll("input[name=first]")) {
    radio.addEventListener("change", () => {
      const isOther = radio.value === "other"
      element("first-other").hidden = !isOther
      if (isOther) element("first-mb").focus()
      else choose({first_mb: radio.value === "" ? null : Number(radio.value)})
    })
  }
  element("first-mb").addEventListener("change", ({target}) => {
    if (target.value !== "" && target.reportValidity()) choose({first_mb: Number(target.value)})
  })
  for (const radio of document.querySelectorAll("input[name=compression]")) {
    radio.addEventListener("change", () => choose({is_compressed: radio.value !== ""}))
  }

  // --- copying --------------------------------------------------------------------------------------------------
  async function copy() {
    const isCopied = await window.overlapscope.copy(element("setting").textContent, element("setting"))
    element("copied").textContent = isCopied ? "copied" : "selected: press Ctrl+C"
  }
  element("chosen").addEventListener("click", ({target}) => target.closest("#copy") && copy())

  window.overlapscope.onKeys({
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    b: () => pick(""),
    p: () => pick("best"),
    n: () => pick("present"),
    d: () => pick("default"),
    c: copy,
  })

  // --- tooltips -------------------------------------------------------------------------------------------------
  for (const [name, figure] of [["curve", plot.root], ["steps", plot.steps], ["strip", plot.plan]]) {
    const nsPerPx = () => (plot.step_range.end - plot.step_range.start) / (figure.inner_width || 1)
    window.overlapscope.askingTip({
      area: element(name), figure, request: plot.pointed, response: plot.tooltip,
      at: ({x, y}) => ({plot: name, x, y, ns_per_px: nsPerPx()}),
    })
  }

  // --- wiring ---------------------------------------------------------------------------------------------------
  const {on} = window.overlapscope
  on(plot.answer, "data", answered)
  window.addEventListener("followed", () => {
    waiting = false // nobody answers a request to the state before
    choose({})
  })
  for (const property of ["start", "end"]) on(plot.size_range, property, showScale)
  for (const figure of [plot.steps, plot.time]) {
    figure.on_event("doubletap", () => plot.step_range.setv({start: 0, end: plot.step_range.bounds[1]}))
  }
  for (const {model} of views) {
    for (const renderer of model.renderers) on(renderer.data_source, "data", holdDrawing)
  }
  let resizing
  on(plot.steps, "inner_width", () => {
    clearTimeout(resizing)
    resizing = setTimeout(() => choose({}), 200)
  })

  const showSteps = (start, end) => plot.step_range.setv({start, end})
  window.overlapscope.keepRange(plot.step_range, showSteps, () => plot.step_range.bounds)
  window.overlapscope.paintPlots()
  showScale()
  const number = (name) => (address.has(name) ? Number(address.get(name)) || null : null)
  choose({
    cap_mb: number("cap_mb"),
    special: address.get("plan") ?? "",
    first_mb: number("first"),
    is_compressed: address.get("compression") === "fp16",
  })
}
